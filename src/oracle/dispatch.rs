//! Dispatch: which rows every rank receives, in which slots, and what travels beside them. All ranks at once, without any communication.

use crate::ep::{Config, IdSpace, Layout, Overflow, Quantize};
use crate::error::{Demand, Limit};
use crate::id::Rank;
use crate::oracle::float;
use crate::tensor::DType;

/// What one rank sends: contiguous rows.
#[derive(Debug, Clone, Default)]
pub struct Tokens {
    /// Rows.
    pub num_tokens: usize,
    /// `[T, H]` of the configuration's type.
    pub x: Vec<u8>,
    /// `[T, K]`. Anything that is no expert is masked, and so is every occurrence of an expert in a row but the first.
    pub topk_idx: Vec<i64>,
    /// `[T, K]`; absent weights count as 1.
    pub topk_weights: Option<Vec<f32>>,
    /// `[T, S]` opaque bytes.
    pub scales: Vec<u8>,
}

/// Where an unmasked route went.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Route {
    /// Global id.
    pub expert: usize,
    /// Its owner.
    pub rank: usize,
    /// Router weight.
    pub weight: f32,
    /// The row at the owner; `None` when it was dropped.
    pub slot: Option<usize>,
}

/// One received row.
#[derive(Debug, Clone, PartialEq)]
pub struct Row {
    /// (source rank, token); `None` for a padding row.
    pub source: Option<(usize, usize)>,
    /// Payload as it arrives.
    pub x: Vec<u8>,
    /// Scale bytes.
    pub scales: Vec<u8>,
    /// Ids `[row_k]`.
    pub topk_idx: Vec<i32>,
    /// Weights `[row_k]`.
    pub topk_weights: Vec<f32>,
}

impl Row {
    /// Word `group` of the row in a column-major scale matrix: four scale bytes, the first lowest, zeros beyond the last.
    pub fn scale_word(&self, group: usize) -> u32 {
        let byte = |i: usize| self.scales.get(4 * group + i).copied().unwrap_or(0) as u32;
        byte(0) | byte(1) << 8 | byte(2) << 16 | byte(3) << 24
    }
}

/// What one rank receives.
#[derive(Debug, Clone, PartialEq)]
pub struct Arrived {
    /// By slot, up to the last valid one; `None`: the slot is not written (behind an expert's rows in `ByExpertFixed`).
    pub rows: Vec<Option<Row>>,
    /// `[L]`: kept rows with a route to each local expert.
    pub num_rows_per_expert: Vec<u32>,
    /// Expert layouts `[L + 1]`, otherwise empty.
    pub segment_start: Vec<u32>,
    /// Rows dropped here.
    pub num_dropped: usize,
    /// `ByToken`: the slots that have a route to each local expert, ascending.
    pub slots_of_expert: Vec<Vec<usize>>,
}

impl Arrived {
    /// `ByToken`: gather indices, each segment padded with -1 to a multiple of `align`, and the segments' starts.
    pub fn gather_idx(&self, align: usize) -> (Vec<i32>, Vec<u32>) {
        let mut idx = Vec::new();
        let mut start = vec![0];
        for slots in &self.slots_of_expert {
            idx.extend(slots.iter().map(|&s| s as i32));
            while !idx.len().is_multiple_of(align) {
                idx.push(-1);
            }
            start.push(idx.len() as u32);
        }
        (idx, start)
    }
}

/// The outcome of a dispatch on every rank.
#[derive(Debug, Clone, PartialEq)]
pub struct Dispatched {
    /// By receiving rank.
    pub ranks: Vec<Arrived>,
    /// By source rank, token and k; `None` for a masked route.
    pub routes: Vec<Vec<Vec<Option<Route>>>>,
    /// By source rank: rows that receivers dropped.
    pub num_dropped: Vec<usize>,
}

/// The owner of every expert.
pub fn owners(config: &Config, world: usize) -> Vec<usize> {
    match &config.expert_map {
        Some(map) => map.iter().map(|rank| rank.index()).collect(),
        None => (0..config.num_experts).map(|e| e * world / config.num_experts).collect(),
    }
}

/// The experts of `rank`, ascending.
fn experts_of(owners: &[usize], rank: usize) -> Vec<usize> {
    (0..owners.len()).filter(|&e| owners[e] == rank).collect()
}

/// The expert of each route of one token; `None` where masked.
fn unmasked(config: &Config, topk_idx: &[i64]) -> Vec<Option<usize>> {
    let mut experts: Vec<Option<usize>> = Vec::new();
    for &id in topk_idx {
        let expert = if id >= 0 && id < config.num_experts as i64 { Some(id as usize) } else { None };
        experts.push(if experts.contains(&expert) { None } else { expert });
    }
    experts
}

/// A row that a receiver would have, before capacity: source, token, and the k of its own route (expert layouts).
#[derive(Clone, Copy)]
struct Candidate {
    source: usize,
    token: usize,
    k: usize,
}

/// Every rank's arrival.
///
/// # Errors
/// What every rank needs and has, when some rank has not enough; of too many tokens, only the ranks that have them.
pub fn dispatch(config: &Config, world: usize, inputs: &[Tokens]) -> Result<Dispatched, Vec<Demand>> {
    let owners = owners(config, world);
    if inputs.iter().any(|t| t.num_tokens > config.max_tokens) {
        // Only of these ranks do the others learn how many tokens they have.
        let mut over = demands(Limit::Tokens, config.max_tokens, inputs.iter().map(|t| t.num_tokens));
        over.retain(|d| d.demand > d.capacity);
        return Err(over);
    }
    let mut routes = routes(config, &owners, inputs);
    let segments: Vec<Vec<Vec<Candidate>>> = (0..world).map(|rank| segments(config, &owners, rank, &routes)).collect();
    check_capacity(config, &segments)?;

    let mut num_dropped = vec![0; world];
    let mut ranks = Vec::new();
    for (rank, segments) in segments.iter().enumerate() {
        ranks.push(arrive(config, &experts_of(&owners, rank), rank, segments, inputs, &mut routes, &mut num_dropped));
    }
    Ok(Dispatched { ranks, routes, num_dropped })
}

/// The same rows in the same slots with new payload: `x` and `scales` of `inputs`.
pub fn replay(config: &Config, dispatched: &Dispatched, inputs: &[Tokens]) -> Dispatched {
    let mut again = dispatched.clone();
    for row in again.ranks.iter_mut().flat_map(|arrived| arrived.rows.iter_mut().flatten()) {
        if let Some((source, token)) = row.source {
            (row.x, row.scales) = payload(config, &inputs[source], token);
        }
    }
    again
}

fn demands(limit: Limit, capacity: usize, demand: impl Iterator<Item = usize>) -> Vec<Demand> {
    demand.enumerate().map(|(r, d)| Demand { rank: Rank(r as u32), limit, demand: d as u64, capacity: capacity as u64 }).collect()
}

fn routes(config: &Config, owners: &[usize], inputs: &[Tokens]) -> Vec<Vec<Vec<Option<Route>>>> {
    let mut all = Vec::new();
    for input in inputs {
        let mut of_rank = Vec::new();
        for token in 0..input.num_tokens {
            let experts = unmasked(config, &input.topk_idx[token * config.k..][..config.k]);
            let mut of_token = Vec::new();
            for (k, expert) in experts.into_iter().enumerate() {
                let weight = input.topk_weights.as_ref().map_or(1.0, |w| w[token * config.k + k]);
                of_token.push(expert.map(|expert| Route { expert, rank: owners[expert], weight, slot: None }));
            }
            of_rank.push(of_token);
        }
        all.push(of_rank);
    }
    all
}

/// The rows that would go to `rank`, in order: one segment for `ByToken`, one for each local expert otherwise.
fn segments(config: &Config, owners: &[usize], rank: usize, routes: &[Vec<Vec<Option<Route>>>]) -> Vec<Vec<Candidate>> {
    let select = |wanted: &dyn Fn(&Route) -> bool| {
        let mut rows = Vec::new();
        for (source, tokens) in routes.iter().enumerate() {
            for (token, of_token) in tokens.iter().enumerate() {
                if let Some(k) = of_token.iter().position(|route| route.as_ref().is_some_and(wanted)) {
                    rows.push(Candidate { source, token, k });
                }
            }
        }
        rows
    };
    match config.layout {
        Layout::ByToken => vec![select(&|route| route.rank == rank)],
        _ => experts_of(owners, rank).into_iter().map(|expert| select(&|route| route.expert == expert)).collect(),
    }
}

/// Rows that a segment keeps.
fn kept_rows(config: &Config, num_rows: usize) -> usize {
    let most = match (config.layout, config.overflow) {
        (Layout::ByExpertFixed { rows_per_expert }, _) => rows_per_expert,
        (Layout::ByToken, Overflow::Drop) => config.max_rows.unwrap_or(usize::MAX),
        (_, Overflow::Drop) => config.max_rows_per_expert.unwrap_or(usize::MAX),
        (_, Overflow::Error) => usize::MAX,
    };
    num_rows.min(most)
}

fn check_capacity(config: &Config, segments: &[Vec<Vec<Candidate>>]) -> Result<(), Vec<Demand>> {
    let (limit, capacity, demand): (_, _, Vec<usize>) = match config.layout {
        Layout::ByToken => {
            let rows = segments.iter().map(|s| kept_rows(config, s[0].len())).collect();
            (Limit::Rows, config.max_rows.unwrap_or(usize::MAX), rows)
        }
        Layout::ByExpert { segment_align } => {
            let padded = |s: &Vec<Candidate>| kept_rows(config, s.len()).div_ceil(segment_align) * segment_align;
            let rows = segments.iter().map(|of_rank| of_rank.iter().map(padded).sum()).collect();
            (Limit::Rows, config.max_rows.unwrap_or(usize::MAX), rows)
        }
        Layout::ByExpertFixed { .. } if config.overflow == Overflow::Drop => return Ok(()),
        Layout::ByExpertFixed { rows_per_expert } => {
            let fullest = segments.iter().map(|of_rank| of_rank.iter().map(Vec::len).max().unwrap_or(0)).collect();
            (Limit::RowsPerExpert, rows_per_expert, fullest)
        }
    };
    if demand.iter().all(|&d| d <= capacity) { Ok(()) } else { Err(demands(limit, capacity, demand.into_iter())) }
}

/// Places the rows of one receiver and notes their slots in `routes`.
fn arrive(
    config: &Config,
    experts: &[usize],
    rank: usize,
    segments: &[Vec<Candidate>],
    inputs: &[Tokens],
    routes: &mut [Vec<Vec<Option<Route>>>],
    num_dropped: &mut [usize],
) -> Arrived {
    let by_token = config.layout == Layout::ByToken;
    let mut arrived = Arrived {
        rows: Vec::new(),
        num_rows_per_expert: vec![0; experts.len()],
        segment_start: if by_token { Vec::new() } else { vec![0] },
        num_dropped: 0,
        slots_of_expert: vec![Vec::new(); experts.len()],
    };
    for (s, segment) in segments.iter().enumerate() {
        let kept = kept_rows(config, segment.len());
        for (i, candidate) in segment.iter().enumerate() {
            let Candidate { source, token, k } = *candidate;
            if i >= kept {
                arrived.num_dropped += 1;
                num_dropped[source] += 1;
                continue;
            }
            let slot = arrived.rows.len();
            let of_token = &mut routes[source][token];
            for route in of_token.iter_mut().flatten() {
                let in_row = if by_token { route.rank == rank } else { route.expert == experts[s] };
                if in_row {
                    route.slot = Some(slot);
                    let local = experts.iter().position(|&e| e == route.expert).expect("the rank owns the expert");
                    arrived.num_rows_per_expert[local] += 1;
                    if by_token {
                        arrived.slots_of_expert[local].push(slot);
                    }
                }
            }
            let shown = if by_token { of_token.clone() } else { vec![of_token[k]] };
            let (topk_idx, topk_weights) = shown.iter().map(|route| metadata(config, experts, rank, route)).unzip();
            let (x, scales) = payload(config, &inputs[source], token);
            arrived.rows.push(Some(Row { source: Some((source, token)), x, scales, topk_idx, topk_weights }));
        }
        match config.layout {
            Layout::ByToken => {}
            Layout::ByExpert { segment_align } => {
                let padding = padding_row(config);
                while !arrived.rows.len().is_multiple_of(segment_align) {
                    arrived.rows.push(Some(padding.clone()));
                }
                arrived.segment_start.push(arrived.rows.len() as u32);
            }
            Layout::ByExpertFixed { rows_per_expert } => {
                arrived.rows.resize((s + 1) * rows_per_expert, None);
                arrived.segment_start.push(arrived.rows.len() as u32);
            }
        }
    }
    arrived
}

/// Id and weight of a route as the receiver sees them.
fn metadata(config: &Config, experts: &[usize], rank: usize, route: &Option<Route>) -> (i32, f32) {
    match (route, config.id_space) {
        (None, _) => (-1, 0.0),
        (Some(route), IdSpace::Global) => (route.expert as i32, route.weight),
        (Some(route), IdSpace::Local) if route.rank != rank => (-1, 0.0),
        (Some(route), IdSpace::Local) => {
            (experts.iter().position(|&e| e == route.expert).expect("the rank owns the expert") as i32, route.weight)
        }
    }
}

/// Bytes and scale bytes of a token's row as it arrives.
fn payload(config: &Config, input: &Tokens, token: usize) -> (Vec<u8>, Vec<u8>) {
    let row_bytes = config.hidden * config.dtype.size();
    let x = &input.x[token * row_bytes..][..row_bytes];
    match config.quantize {
        None => (x.to_vec(), input.scales[token * config.scale_bytes..][..config.scale_bytes].to_vec()),
        Some(quantize) => quantize_row(quantize, &float::values(config.dtype, x)),
    }
}

fn padding_row(config: &Config) -> Row {
    let (row_bytes, scale_bytes) = match config.quantize {
        None => (config.hidden * config.dtype.size(), config.scale_bytes),
        Some(Quantize::F32) => (config.hidden, 4 * config.hidden.div_ceil(128)),
        Some(Quantize::PowerOfTwo) => (config.hidden, config.hidden.div_ceil(128)),
    };
    Row { source: None, x: vec![0; row_bytes], scales: vec![0; scale_bytes], topk_idx: vec![-1], topk_weights: vec![0.0] }
}

/// e4m3 bytes of a row, and its scales: one per 128 elements (spec: DeepSeek-V3's activation blocks), the last block may be short.
pub fn quantize_row(quantize: Quantize, x: &[f32]) -> (Vec<u8>, Vec<u8>) {
    let mut q = Vec::new();
    let mut scales = Vec::new();
    for block in x.chunks(128) {
        let mut amax = 0f32;
        for &v in block {
            if !v.is_nan() && v.abs() > amax {
                amax = v.abs();
            }
        }
        let m = if amax > 1e-4 { amax } else { 1e-4 }; // 1e-4, 448: spec (DeepGEMM's cast; e4m3's largest value)
        let factor = match quantize {
            Quantize::F32 => {
                scales.extend((m / 448.0).to_le_bytes());
                448.0 / m
            }
            Quantize::PowerOfTwo => {
                let e = ceil_log2(m / 448.0).clamp(-127, 127); // 127: spec (E8M0's bias)
                scales.push((e + 127) as u8);
                2f64.powi(-e) as f32 // exact: 2^-127 is a subnormal f32
            }
        };
        q.extend(block.iter().map(|&v| float::narrow(DType::E4M3, v * factor) as u8));
    }
    (q, scales)
}

/// The least `e` with 2^e >= x, for x > 0.
fn ceil_log2(x: f32) -> i32 {
    let mut e = -149; // the smallest f32 is 2^-149
    while e < 128 && 2f64.powi(e) < x as f64 {
        e += 1;
    }
    e
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tokens(k: usize, hidden: usize, topk_idx: &[i64]) -> Tokens {
        let num_tokens = topk_idx.len() / k;
        let x = (0..num_tokens * hidden).map(|i| i as u8).collect();
        let weights = (0..topk_idx.len()).map(|i| i as f32 + 0.5).collect();
        Tokens { num_tokens, x, topk_idx: topk_idx.to_vec(), topk_weights: Some(weights), scales: Vec::new() }
    }

    /// Two ranks, four experts (0, 1 on rank 0; 2, 3 on rank 1), worked out by hand.
    #[test]
    fn a_small_world_by_hand() {
        let config = Config::new(16, DType::Bytes, 4, 3, 4);
        let inputs = [tokens(3, 16, &[0, 3, 1, 2, 2, -1]), tokens(3, 16, &[4, 9, -7, 1, 0, 2])];
        let d = dispatch(&config, 2, &inputs).unwrap();
        let sources = |r: usize| d.ranks[r].rows.iter().map(|row| row.as_ref().unwrap().source.unwrap()).collect::<Vec<_>>();
        assert_eq!(sources(0), [(0, 0), (1, 1)]);
        assert_eq!(sources(1), [(0, 0), (0, 1), (1, 1)]);
        let row = d.ranks[1].rows[1].as_ref().unwrap();
        assert_eq!((row.topk_idx.as_slice(), row.topk_weights.as_slice()), (&[2, -1, -1][..], &[3.5, 0.0, 0.0][..]));
        assert_eq!(row.x, (16..32).collect::<Vec<u8>>());
        assert_eq!(d.ranks[0].num_rows_per_expert, [2, 2]);
        assert_eq!(d.ranks[1].num_rows_per_expert, [2, 1]);
        assert_eq!(d.ranks[1].gather_idx(2), (vec![1, 2, 0, -1], vec![0, 2, 4]));

        let config = Config { layout: Layout::ByExpert { segment_align: 3 }, id_space: IdSpace::Local, ..config };
        let d = dispatch(&config, 2, &inputs).unwrap();
        let rows: Vec<_> = d.ranks[0].rows.iter().map(|row| row.as_ref().unwrap()).map(|row| (row.source, row.topk_idx[0])).collect();
        let (a, b) = (Some((0, 0)), Some((1, 1)));
        assert_eq!(rows, [(a, 0), (b, 0), (None, -1), (a, 1), (b, 1), (None, -1)]);
        assert_eq!(d.ranks[1].segment_start, [0, 3, 6]);
        assert_eq!(d.routes[1][1][2].unwrap().slot, Some(1));
    }

    #[test]
    fn capacity_counts_every_rank() {
        let inputs = [tokens(1, 16, &[0, 0, 0]), tokens(1, 16, &[0, 1])];
        let config = Config { max_rows: Some(3), ..Config::new(16, DType::Bytes, 2, 1, 4) };
        let demand = dispatch(&config, 2, &inputs).unwrap_err();
        assert_eq!(demand.iter().map(|d| (d.rank.0, d.demand, d.capacity)).collect::<Vec<_>>(), [(0, 4, 3), (1, 1, 3)]);
        let drop = Config { overflow: Overflow::Drop, ..config.clone() };
        let d = dispatch(&drop, 2, &inputs).unwrap();
        assert_eq!((d.ranks[0].num_dropped, d.num_dropped, d.routes[1][0][0].unwrap().slot), (1, vec![0, 1], None));
        let tokens = Config { max_tokens: 2, ..config };
        let demand = dispatch(&tokens, 2, &inputs).unwrap_err();
        assert_eq!(demand.iter().map(|d| (d.limit, d.demand, d.capacity)).collect::<Vec<_>>(), [(Limit::Tokens, 3, 2)]);
    }

    #[test]
    fn scales_by_hand() {
        let mut x = vec![0.0; 130];
        (x[0], x[1], x[2], x[128]) = (-896.0, f32::NAN, 1.0, 0.0);
        let (q, scales) = quantize_row(Quantize::F32, &x);
        // amax 896: scale 2, so -896 is -448 (0xFE) and 1 is 0.5 (0x30).
        assert_eq!((&q[..3], &scales[..4]), (&[0xFE, 0x7F, 0x30][..], &2f32.to_le_bytes()[..]));
        assert_eq!(scales[4..], (1e-4f32 / 448.0).to_le_bytes());
        let (q, scales) = quantize_row(Quantize::PowerOfTwo, &x);
        // 1e-4 / 448 is between 2^-23 and 2^-22.
        assert_eq!((&q[..3], &scales[..]), (&[0xFE, 0x7F, 0x30][..], &[128, 105][..]));
        x[0] = 900.0; // just above: the scale becomes 4, and 900 / 4 = 225 rounds to 224 (0x76)
        let (q, scales) = quantize_row(Quantize::PowerOfTwo, &x);
        assert_eq!((q[0], scales[0]), (0x76, 129));
        x[0] = f32::INFINITY;
        let (q, scales) = quantize_row(Quantize::F32, &x);
        assert_eq!((q[0], q[2], &scales[..4]), (0x7F, 0, &f32::INFINITY.to_le_bytes()[..]));
    }
}
