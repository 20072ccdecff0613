//! Rows, routes and what must come of them: everything follows from a seed, so that each rank makes its own part.
#![forbid(unsafe_code)]

use moe_kernels::ep::{Config, Reduce};
use moe_kernels::ops::dispatch::Arrival;
use moe_kernels::oracle::dispatch::{Dispatched, Route, Tokens, dispatch, quantize_row};
use moe_kernels::oracle::{combine, float};
use moe_kernels::random::SplitMix64;
use moe_kernels::routing::Routes;
use moe_kernels::{DType, Result, Slot};
use rayon::prelude::*;

use super::options::{Shape, invalid};

/// Purposes of the streams of numbers inside one seed.
const ROWS: u64 = 1;
const EXPERT_ROWS: u64 = 2;
const SCALES: u64 = 3;

/// Bytes that are made and copied at a time (arbitrary: many rows, and little memory).
const CHUNK_BYTES: usize = 64 << 20;

/// What every rank of one measurement knows.
pub struct Case {
    pub config: Config,
    pub ranks: usize,
    pub seed: u64,
    /// By rank; their number of tokens is the rank's.
    pub routes: Vec<Routes>,
    /// Where every row goes; its payload is made anew when it is compared.
    placed: Dispatched,
}

/// What moves in one call.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Traffic {
    /// Rows that leave the rank for others.
    pub rows_out: u64,
    /// Rows that the rank receives, its own included.
    pub rows_in: u64,
    /// Bytes of rows and metadata that leave it in a dispatch.
    pub dispatch_out_bytes: u64,
    /// Metadata among them: records and count words.
    pub metadata_bytes: u64,
    /// Bytes of received rows, its own included: what others call the bandwidth of a dispatch.
    pub dispatch_in_bytes: u64,
    /// What a dispatch reads once and writes once per destination.
    pub dispatch_moved_bytes: u64,
    /// Bytes of experts' rows that leave it in a combine.
    pub combine_out_bytes: u64,
    /// Bytes of the rows of which its results are the sums.
    pub combine_in_bytes: u64,
    /// What a combine reads, and the results.
    pub combine_moved_bytes: u64,
}

/// Bytes that leave the GPU of a rank in one call.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct LinkBytes {
    pub dispatch: u64,
    pub combine: u64,
}

impl std::ops::AddAssign for LinkBytes {
    fn add_assign(&mut self, other: Self) {
        self.dispatch += other.dispatch;
        self.combine += other.combine;
    }
}

impl std::ops::AddAssign for Traffic {
    fn add_assign(&mut self, other: Self) {
        self.rows_out += other.rows_out;
        self.rows_in += other.rows_in;
        self.dispatch_out_bytes += other.dispatch_out_bytes;
        self.metadata_bytes += other.metadata_bytes;
        self.dispatch_in_bytes += other.dispatch_in_bytes;
        self.dispatch_moved_bytes += other.dispatch_moved_bytes;
        self.combine_out_bytes += other.combine_out_bytes;
        self.combine_in_bytes += other.combine_in_bytes;
        self.combine_moved_bytes += other.combine_moved_bytes;
    }
}

impl Case {
    /// What the options of a benchmark ask for.
    pub fn new(shape: &Shape, num_tokens: usize) -> Result<Self> {
        Self::of(shape.config(num_tokens)?, shape.seed, shape.routes(num_tokens)?)
    }

    /// Rows that follow from `seed`, sent by these routes.
    ///
    /// # Errors
    /// Rows that do not fit.
    pub fn of(config: Config, seed: u64, routes: Vec<Routes>) -> Result<Self> {
        let ranks = routes.len();
        config.plan(ranks)?;
        // Rows of one element: the oracle says where they go, and holds no payload.
        let small = Config { hidden: 1, dtype: DType::F32, scale_bytes: 0, quantize: None, ..config.clone() };
        let tokens = |routes: &Routes| Tokens {
            num_tokens: routes.num_tokens,
            x: vec![0; 4 * routes.num_tokens],
            topk_idx: routes.topk_idx.iter().map(|&id| i64::from(id)).collect(),
            topk_weights: Some(routes.topk_weights.clone()),
            scales: Vec::new(),
        };
        let placed = dispatch(&small, ranks, &routes.iter().map(tokens).collect::<Vec<_>>());
        let placed = placed.map_err(|demands| {
            let demands: Vec<String> = demands.iter().map(ToString::to_string).collect();
            invalid("routes", demands.join("; "), "rows that fit")
        })?;
        Ok(Case { config, ranks, seed, routes, placed })
    }

    /// The same routes with other rows.
    pub fn replayed(&self, seed: u64) -> Self {
        Case { config: self.config.clone(), ranks: self.ranks, seed, routes: self.routes.clone(), placed: self.placed.clone() }
    }

    /// Tokens of a rank.
    pub fn num_tokens(&self, rank: usize) -> usize {
        self.routes[rank].num_tokens
    }

    /// Rows that a rank receives, padding included.
    pub fn num_slots(&self, rank: usize) -> usize {
        self.placed.ranks[rank].rows.len()
    }

    /// What one rank moves.
    pub fn traffic(&self, rank: usize) -> Result<Traffic> {
        self.traffic_beyond(rank, |other| other == rank)
    }

    /// What leaves one rank for ranks on other GPUs, when ranks take turns on `num_gpus`; with one, for other ranks.
    pub fn link_bytes(&self, rank: usize, num_gpus: usize) -> Result<LinkBytes> {
        let is_near = |other: usize| if num_gpus > 1 { other % num_gpus == rank % num_gpus } else { other == rank };
        let traffic = self.traffic_beyond(rank, is_near)?;
        Ok(LinkBytes { dispatch: traffic.dispatch_out_bytes, combine: traffic.combine_out_bytes })
    }

    /// What one rank moves, and of that as what leaves it that which goes to others than those that are near.
    fn traffic_beyond(&self, rank: usize, is_near: impl Fn(usize) -> bool) -> Result<Traffic> {
        let (c, plan) = (&self.config, self.config.plan(self.ranks)?);
        let x_row_bytes = c.hidden * c.dtype.size();
        let each_route = c.layout.is_by_expert() && c.reduce == Reduce::AtSource;
        let record_bytes = if c.layout.is_by_expert() { plan.transit_bytes } else { plan.record_bytes };
        let (mut t, mut sum_rows) = (Traffic::default(), 0);
        for (source, tokens) in self.placed.routes.iter().enumerate() {
            for token in tokens {
                let mut seen = 0u64; // at most 64 ranks
                for route in token.iter().flatten().filter(|route| route.slot.is_some()) {
                    let is_first = seen >> route.rank & 1 == 0;
                    seen |= 1 << route.rank;
                    let travels = is_first || each_route;
                    if source == rank {
                        t.rows_out += u64::from(is_first && !is_near(route.rank));
                        sum_rows += u64::from(travels);
                    }
                    if route.rank == rank {
                        t.rows_in += u64::from(is_first);
                        t.combine_out_bytes += if travels && !is_near(source) { plan.wire_row_bytes as u64 } else { 0 };
                    }
                }
            }
        }
        let ranks_of =
            |token: &Vec<Option<Route>>| token.iter().flatten().filter(|r| r.slot.is_some()).fold(0u64, |seen, r| seen | 1 << r.rank);
        let rows_all: u64 = self.placed.routes[rank].iter().map(|token| u64::from(ranks_of(token).count_ones())).sum();
        let num_far = (0..self.ranks).filter(|&other| !is_near(other)).count();
        t.metadata_bytes = t.rows_out * record_bytes as u64 + 8 * (plan.num_count_words * num_far) as u64;
        t.dispatch_out_bytes = t.rows_out * plan.row_bytes as u64 + t.metadata_bytes;
        t.dispatch_in_bytes = t.rows_in * plan.row_bytes as u64;
        t.dispatch_moved_bytes = (self.num_tokens(rank) * x_row_bytes) as u64 + rows_all * plan.row_bytes as u64;
        t.combine_in_bytes = sum_rows * plan.wire_row_bytes as u64;
        t.combine_moved_bytes = t.combine_in_bytes + (self.num_tokens(rank) * c.hidden * c.combine_dtype.size()) as u64;
        Ok(t)
    }

    fn x_row_bytes(&self) -> usize {
        self.config.hidden * self.config.dtype.size()
    }

    fn y_row_bytes(&self) -> usize {
        self.config.hidden * self.config.combine_dtype.size()
    }

    fn fill_x(&self, rank: usize, copy: usize, token: usize, row: &mut [u8]) {
        let stream = (copy as u64) << 48 | (rank as u64) << 32 | token as u64; // derived: fewer than 2^16 copies and ranks, 2^32 tokens
        fill(self.config.dtype, &SplitMix64::stream(self.seed ^ ROWS << 56, stream), row);
    }

    fn fill_y(&self, rank: usize, slot: usize, row: &mut [u8]) {
        let stream = (rank as u64) << 32 | slot as u64;
        fill(self.config.combine_dtype, &SplitMix64::stream(self.seed ^ EXPERT_ROWS << 56, stream), row);
    }

    /// The rows of x of one copy, a chunk at a time.
    pub fn x(&self, rank: usize, copy: usize, write: impl FnMut(usize, &[u8]) -> Result<()>) -> Result<()> {
        chunks(self.num_tokens(rank), self.x_row_bytes(), |token, row| self.fill_x(rank, copy, token, row), write)
    }

    /// The rows that experts write, a chunk at a time.
    pub fn y(&self, rank: usize, write: impl FnMut(usize, &[u8]) -> Result<()>) -> Result<()> {
        chunks(self.num_slots(rank), self.y_row_bytes(), |slot, row| self.fill_y(rank, slot, row), write)
    }

    /// The caller's scales `[T, S]`.
    pub fn scales(&self, rank: usize) -> Vec<u8> {
        let mut scales = vec![0; self.num_tokens(rank) * self.config.scale_bytes];
        if self.config.scale_bytes > 0 {
            let of_token = |(token, row): (usize, &mut [u8])| {
                fill(DType::F32, &SplitMix64::stream(self.seed ^ SCALES << 56, (rank as u64) << 32 | token as u64), row);
            };
            scales.par_chunks_mut(self.config.scale_bytes).enumerate().for_each(of_token);
        }
        scales
    }

    /// What is wrong with an arrival, if anything: every row, with its metadata, byte for byte.
    pub fn check_arrival(&self, rank: usize, copy: usize, arrival: &Arrival) -> Result<Option<String>> {
        let received = arrival.on_host()?;
        let want = &self.placed.ranks[rank];
        if received.num_rows() != want.rows.len() {
            return Ok(Some(format!("rank {rank}: {} rows arrived, expected {}", received.num_rows(), want.rows.len())));
        }
        let scales: Vec<Vec<u8>> = if self.config.scale_bytes > 0 { (0..self.ranks).map(|r| self.scales(r)).collect() } else { Vec::new() };
        let is_wrong = |slot: usize| {
            let row = want.rows[slot].as_ref()?;
            let at = Slot(slot as u32);
            let metadata = received.metadata(at);
            let source = metadata.source.map(|(rank, token)| (rank.index(), token.index()));
            if source != row.source
                || row.source.is_some() && (metadata.topk_idx != row.topk_idx || metadata.topk_weights != row.topk_weights)
            {
                return Some(format!("rank {rank}, row {slot}: its record says {metadata:?}, expected source {:?}", row.source));
            }
            let (source, token) = row.source?;
            let mut x = vec![0; self.x_row_bytes()];
            self.fill_x(source, copy, token, &mut x);
            let (x, want_scales) = match self.config.quantize {
                None => {
                    (x, scales.get(source).map_or(Vec::new(), |s| s[token * self.config.scale_bytes..][..self.config.scale_bytes].to_vec()))
                }
                Some(quantize) => quantize_row(quantize, &float::values(self.config.dtype, &x)),
            };
            let same_scales = want_scales.is_empty() || received.scales(at) == want_scales;
            (received.row(at) != x || !same_scales)
                .then(|| format!("rank {rank}, row {slot}: not the row of token {token} of rank {source}"))
        };
        // An arrival of a GPU may be looked at by many threads: it is a copy by now.
        Ok((0..want.rows.len()).into_par_iter().find_map_first(is_wrong))
    }

    /// What is wrong with the results, if anything: `most` tokens, evenly spread, bit for bit.
    pub fn check_out(&self, rank: usize, out: &[u8], most: usize) -> Option<String> {
        let row_bytes = self.y_row_bytes();
        let num_tokens = self.num_tokens(rank);
        let num = most.min(num_tokens);
        let wrong = (0..num).into_par_iter().find_map_any(|i| {
            // The first and the last among them.
            let token = if num > 1 { i * (num_tokens - 1) / (num - 1) } else { 0 };
            let got = &out[token * row_bytes..][..row_bytes];
            (got != self.sum(rank, token)).then_some(token)
        });
        wrong.map(|token| format!("rank {rank}: the sum of token {token} is wrong"))
    }

    fn sum(&self, rank: usize, token: usize) -> Vec<u8> {
        let row_bytes = self.y_row_bytes();
        let mut y = vec![Vec::new(); self.ranks];
        // Only the rows of this token, under numbers of their own.
        let mut renumbered: Vec<Option<Route>> = Vec::new();
        let mut known: Vec<(usize, usize, usize)> = Vec::new();
        for route in &self.placed.routes[rank][token] {
            renumbered.push(route.map(|route| {
                let Some(slot) = route.slot else { return route };
                let found = known.iter().find(|(rank, from, _)| (*rank, *from) == (route.rank, slot)).map(|(_, _, to)| *to);
                let to = found.unwrap_or_else(|| {
                    let to = y[route.rank].len() / row_bytes;
                    y[route.rank].resize((to + 1) * row_bytes, 0);
                    self.fill_y(route.rank, slot, &mut y[route.rank][to * row_bytes..]);
                    known.push((route.rank, slot, to));
                    to
                });
                Route { slot: Some(to), ..route }
            }));
        }
        let mut out = Vec::with_capacity(row_bytes);
        match combine::sum(&self.config, &renumbered, &y) {
            None => out.resize(row_bytes, 0),
            Some(sum) => sum.iter().for_each(|&v| float::push(self.config.combine_dtype, v, &mut out)),
        }
        out
    }

    /// Whether experts' rows in the bank are still what they were after a combine: a rank that sums its rows writes them there.
    pub fn keeps_expert_rows(&self) -> bool {
        !self.config.layout.is_by_expert() || self.config.reduce == Reduce::AtSource
    }
}

/// Rows of `row_bytes`, made in parallel and written in chunks at their offset.
fn chunks(
    num_rows: usize,
    row_bytes: usize,
    make: impl Fn(usize, &mut [u8]) + Sync,
    mut write: impl FnMut(usize, &[u8]) -> Result<()>,
) -> Result<()> {
    let rows_of_chunk = (CHUNK_BYTES / row_bytes.max(1)).max(1);
    let mut bytes = vec![0; rows_of_chunk.min(num_rows) * row_bytes];
    for first in (0..num_rows).step_by(rows_of_chunk) {
        let chunk = &mut bytes[..rows_of_chunk.min(num_rows - first) * row_bytes];
        chunk.par_chunks_mut(row_bytes).enumerate().for_each(|(i, row)| make(first + i, row));
        write(first * row_bytes, chunk)?;
    }
    Ok(())
}

/// Finite numbers of either sign, from 0.5 on and below 2; any bytes in types that are only moved.
fn fill(dtype: DType, random: &SplitMix64, row: &mut [u8]) {
    // Derived from the formats: sign and mantissa are random, and of bf16 the lowest bit of the exponent.
    let (random_bits, set_bits): (u64, u64) = match dtype {
        DType::BF16 => (0x80FF_80FF_80FF_80FF, 0x3F00_3F00_3F00_3F00),
        DType::F16 => (0x83FF_83FF_83FF_83FF, 0x3800_3800_3800_3800),
        DType::F32 => (0x807F_FFFF_807F_FFFF, 0x3F00_0000_3F00_0000),
        _ => (u64::MAX, 0),
    };
    for (i, chunk) in row.chunks_mut(8).enumerate() {
        let word = random.at(i as u64) & random_bits | set_bits;
        chunk.copy_from_slice(&word.to_le_bytes()[..chunk.len()]);
    }
}

#[cfg(test)]
mod tests {
    use moe_kernels::ep::Layout;
    use moe_kernels::routing::synthetic::{Kind, Synthetic};

    use super::*;

    fn case(ranks: usize, tokens: usize, layout: Layout, reduce: Reduce) -> Case {
        let of_rank = |rank| Synthetic { kind: Kind::Uniform, num_experts: 16, k: 3, seed: 1, stream: rank as u64 }.routes(tokens).unwrap();
        let config = Config { layout, reduce, ..Config::new(64, DType::BF16, 16, 3, tokens) };
        Case::of(config, 1, (0..ranks).map(of_rank).collect()).unwrap()
    }

    /// Rows that one rank sends to another: by hand, from the routes.
    fn rows(case: &Case, from: usize, to: usize) -> u64 {
        let routes = &case.routes[from];
        let goes = |token: &&[i32]| token.iter().any(|&expert| expert as usize * case.ranks / 16 == to);
        routes.topk_idx.chunks(3).filter(goes).count() as u64
    }

    #[test]
    fn what_leaves_a_gpu() {
        let case = case(4, 50, Layout::ByToken, Reduce::AtRank);
        let plan = case.config.plan(4).unwrap();
        for num_gpus in [1, 2, 3, 4] {
            for rank in 0..4 {
                let is_far = |other: &usize| if num_gpus == 1 { *other != rank } else { other % num_gpus != rank % num_gpus };
                let far: Vec<usize> = (0..4).filter(is_far).collect();
                let sent: u64 = far.iter().map(|&to| rows(&case, rank, to)).sum();
                let returned: u64 = far.iter().map(|&from| rows(&case, from, rank)).sum();
                let words = 8 * (plan.num_count_words * far.len()) as u64;
                let want = LinkBytes {
                    dispatch: sent * (plan.row_bytes + plan.record_bytes) as u64 + words,
                    combine: returned * plan.wire_row_bytes as u64,
                };
                assert_eq!(case.link_bytes(rank, num_gpus).unwrap(), want, "rank {rank} of 4 on {num_gpus} GPUs");
                assert!(want.dispatch > 0 && want.combine > 0);
            }
        }
        // One GPU a rank: all that leaves the rank, as with ranks that share one.
        for rank in 0..4 {
            let traffic = case.traffic(rank).unwrap();
            let all = LinkBytes { dispatch: traffic.dispatch_out_bytes, combine: traffic.combine_out_bytes };
            assert_eq!([1, 4].map(|num_gpus| case.link_bytes(rank, num_gpus).unwrap()), [all; 2]);
        }
    }

    #[test]
    fn expert_rows_travel_one_by_one_where_the_source_sums() {
        let layout = Layout::ByExpert { segment_align: 1 };
        let [at_rank, at_source] = [Reduce::AtRank, Reduce::AtSource].map(|reduce| case(2, 50, layout, reduce).link_bytes(0, 2).unwrap());
        assert_eq!(at_rank.dispatch, at_source.dispatch);
        // Of 3 of 16 experts often two are on one rank.
        assert!(at_source.combine > at_rank.combine, "{at_source:?} {at_rank:?}");
    }
}
