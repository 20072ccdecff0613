//! Geometry that was measured: tables of `moe tune`, shipped with the library or brought by a program.
//!
//! A row counts for the model of GPU that its table names, and for calls of its own key alone: phase, ranks, ranks that share the GPU, mode, wire, layout, type and
//! length of a row, routes of a token, multiprocessors. Everything else follows the rule of `dispatch/gpu/tuning.rs` and `combine/gpu/tuning.rs`.
#![forbid(unsafe_code)]

use std::collections::HashMap;
use std::sync::{Mutex, OnceLock};

use super::tuning::Class;
use crate::ep::world::lock;
use crate::ep::{Config, Layout, Mode, Plan, Quantize, Reduce, Wire};
use crate::error::{Error, Result};

const OP: &str = "tuning table";

/// The tables of this library.
const SHIPPED: [&str; 1] = [include_str!("tables/h200.json")];

/// What `moe tune` writes.
#[derive(Debug, Clone, PartialEq, serde::Serialize, serde::Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Table {
    /// The model as its driver names it. No other model uses the table.
    pub gpu: String,
    /// Architecture, such as `sm_90`.
    pub arch: String,
    /// Where the figures are from.
    pub provenance: Provenance,
    /// One for each phase, shape and number of tokens.
    pub rows: Vec<Row>,
}

/// Where a table is from.
#[derive(Debug, Clone, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Provenance {
    /// When it was measured.
    pub time: String,
    /// Of which commit.
    pub commit: String,
    /// With which command.
    pub command: String,
    /// Driver, compiler, what else matters.
    pub note: String,
}

/// A phase.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TablePhase {
    /// Dispatch and replay.
    Dispatch,
    /// Combine.
    Combine,
}

/// Which calls a row is for.
#[derive(Debug, Clone, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
pub struct Key {
    /// Phase.
    pub phase: TablePhase,
    /// Ranks.
    pub ranks: u32,
    /// Ranks that share the GPU.
    pub ranks_on_gpu: u32,
    /// `throughput` or `low_latency`.
    pub mode: String,
    /// `as_is`, `fp8_direct` or `fp8_block`, with where rows are summed in an expert layout.
    pub wire: String,
    /// `by_token`, `by_expert` or `by_expert_fixed`.
    pub layout: String,
    /// Type of the rows that travel: of dispatch with what quantises them, of combine.
    pub dtype: String,
    /// Elements of a row.
    pub hidden: u32,
    /// Routes of a token.
    pub k: u32,
    /// Most multiprocessors of the phase; 0 without a limit.
    pub sms: u32,
}

/// A measured geometry.
#[derive(Debug, Clone, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct Row {
    /// Which calls it is for.
    #[serde(flatten)]
    pub key: Key,
    /// Tokens of a rank.
    pub tokens: u32,
    /// Blocks.
    pub blocks: u32,
    /// Threads of a block.
    pub threads: u32,
    /// Seconds of a call with it.
    pub seconds: f64,
    /// Seconds of a call with what would have been chosen without this row, measured in turns with it.
    pub before_seconds: f64,
}

/// Blocks and threads by number of tokens, ascending.
type Rows = Vec<(u32, u32, u32)>;

/// By model of GPU and key. What is found stays as long as the process.
type Known = HashMap<(String, Key), &'static [(u32, u32, u32)]>;

static KNOWN: OnceLock<Mutex<Known>> = OnceLock::new();

impl Table {
    /// Reads a table.
    ///
    /// # Errors
    /// `Invalid` for what is no table, or holds a geometry that no kernel can have.
    pub fn parse(text: &str) -> Result<Self> {
        let table: Table = serde_json::from_str(text).map_err(|e| Error::invalid(OP, "text", e, "a table that moe tune has written"))?;
        let is_bad = |row: &&Row| row.blocks == 0 || !row.threads.is_multiple_of(64) || !(64..=1024).contains(&row.threads);
        match table.rows.iter().find(is_bad) {
            Some(row) => {
                let got = format!("{}x{} at {} tokens", row.blocks, row.threads, row.tokens);
                Err(Error::invalid(OP, "geometry", got, "at least 1 block, of 64 to 1024 threads, a multiple of 64"))
            }
            None => Ok(table),
        }
    }

    /// The tables that are shipped.
    pub fn shipped() -> Vec<Table> {
        // Compiled in, and parsed by a test.
        SHIPPED.iter().filter_map(|text| Table::parse(text).ok()).collect()
    }

    /// Tokens that share the threads of their kernel: to 16, to 512, above.
    pub fn class_of(num_tokens: u32) -> usize {
        Class::of(num_tokens) as usize
    }

    /// The number of tokens whose row says how many threads a class has: the nearest to it.
    pub fn typical_tokens(class: usize) -> u32 {
        Class::ALL.get(class).map_or(1, |class| class.typical())
    }

    /// Objects that are made from now on use this table, before those that are shipped, on GPUs of its model.
    pub fn install(&self) {
        add(&mut lock(known()), self);
    }
}

fn known() -> &'static Mutex<Known> {
    KNOWN.get_or_init(|| {
        let mut known = Known::new();
        Table::shipped().iter().for_each(|table| add(&mut known, table));
        Mutex::new(known)
    })
}

fn add(known: &mut Known, table: &Table) {
    let mut by_key: HashMap<Key, Rows> = HashMap::new();
    for row in &table.rows {
        by_key.entry(row.key.clone()).or_default().push((row.tokens, row.blocks, row.threads));
    }
    for (key, mut rows) in by_key {
        rows.sort_unstable();
        known.insert((table.gpu.clone(), key), Vec::leak(rows));
    }
}

/// What a table says of one phase of an object.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Measured {
    rows: &'static [(u32, u32, u32)],
    /// Most tokens of the middle class.
    most_some: u32,
}

impl Measured {
    /// Of a GPU of this model.
    pub fn find(gpu: &str, key: &Key) -> Self {
        Self::within(gpu, key, Class::Some.most())
    }

    /// As [`find`](Self::find), of a phase whose middle class ends at `most_some` tokens.
    pub fn within(gpu: &str, key: &Key, most_some: u32) -> Self {
        Measured { rows: lock(known()).get(&(gpu.to_owned(), key.clone())).copied().unwrap_or(&[]), most_some }
    }

    /// Threads of a block, for a class of calls: of the row nearest to the number of tokens that stands for it.
    pub fn threads(&self, class: Class) -> Option<u32> {
        self.of_class(class).min_by_key(|(tokens, ..)| distance(*tokens, class.typical())).map(|(_, _, threads)| *threads)
    }

    /// Blocks for a number of tokens: of the nearest row with the threads of its class, as many more or fewer as there are tokens.
    pub fn blocks(&self, tokens: u32, class: Class) -> Option<u32> {
        let row = self.of_threads(class).min_by_key(|(other, ..)| distance(*other, tokens));
        row.map(|row| in_proportion(row, tokens))
    }

    /// No number of tokens of a class has more blocks; 0 without a row.
    pub fn most_blocks(&self, class: Class) -> u32 {
        self.of_threads(class).map(|row| in_proportion(row, class.most())).max().unwrap_or(0)
    }

    fn of_threads(&self, class: Class) -> impl Iterator<Item = &'static (u32, u32, u32)> + use<> {
        let threads = self.threads(class);
        self.of_class(class).filter(move |row| Some(row.2) == threads)
    }

    fn of_class(&self, class: Class) -> impl Iterator<Item = &'static (u32, u32, u32)> + use<> {
        let most_some = self.most_some;
        self.rows.iter().filter(move |(tokens, ..)| Class::within(*tokens, most_some) == class)
    }
}

/// The blocks of a row for another number of tokens.
fn in_proportion(&(of, blocks, _): &(u32, u32, u32), tokens: u32) -> u32 {
    let scaled = (u64::from(blocks) * u64::from(tokens)).div_ceil(u64::from(of.max(1)));
    u32::try_from(scaled).unwrap_or(u32::MAX).max(1)
}

/// How far apart two numbers of tokens are, as a ratio in thousandths.
fn distance(a: u32, b: u32) -> u64 {
    let (a, b) = (u64::from(a.max(1)), u64::from(b.max(1)));
    a.max(b) * 1000 / a.min(b)
}

impl Key {
    /// Of an object's calls.
    pub fn new(phase: TablePhase, c: &Config, p: &Plan, ranks_on_gpu: u32, sms: Option<u32>) -> Self {
        let is_by_expert = c.layout.is_by_expert();
        let wire = match c.wire {
            Wire::AsIs => "as_is",
            Wire::Fp8Direct => "fp8_direct",
            Wire::Fp8Block => "fp8_block",
        };
        let reduce = match c.reduce {
            _ if !is_by_expert => "",
            Reduce::AtRank => " at_rank",
            Reduce::AtRankF32 => " at_rank_f32",
            Reduce::AtSource => " at_source",
        };
        let quantized = match c.quantize {
            None => "",
            Some(Quantize::F32) => " to e4m3",
            Some(Quantize::PowerOfTwo) => " to e4m3 by powers of two",
        };
        let is_dispatch = phase == TablePhase::Dispatch;
        Key {
            phase,
            ranks: p.world as u32,
            ranks_on_gpu,
            mode: if c.mode == Mode::LowLatency && p.staged_rows > 0 { "low_latency" } else { "throughput" }.into(),
            wire: if is_dispatch { String::new() } else { format!("{wire}{reduce}") },
            layout: match c.layout {
                Layout::ByToken => "by_token",
                Layout::ByExpert { .. } => "by_expert",
                Layout::ByExpertFixed { .. } => "by_expert_fixed",
            }
            .into(),
            dtype: if is_dispatch { format!("{}{quantized}", c.dtype) } else { c.combine_dtype.to_string() },
            hidden: c.hidden as u32,
            k: c.k as u32,
            sms: sms.unwrap_or(0),
        }
    }
}

/// How geometry is chosen, for people.
pub const RULE: &str = "\
Blocks and threads of the kernel that moves rows are chosen by the first of these that says anything:
1. the caller (Tuning, --geometry). --sms bounds the blocks of all of them.
2. a table that was measured on this model of GPU, for the same ranks, ranks on the GPU, mode, wire, layout, type, length, routes and --sms: threads of the
   row nearest to 1, 128 or 4096 tokens in the call's class (to 16, to 512, above), blocks of the row nearest to the call's tokens that has them, as many
   more or fewer as the call has tokens.
   The table of another model is never used.
3. the rule. Dispatch: a warp for each of 14 parts of a row to 16 tokens, of 4 to 512; above, rows whole and twice as many blocks, but of ranks that share
   the GPU 3 or 4 sevenths and more fourteenths; 256 threads (512 for 17 to 512 tokens at more than 4 ranks, and with --sms; 192 with sevenths); at most
   1024 blocks, of parts of many rows 16384. Combine: a warp for each part, of 32 vectors to 16 tokens, 7 parts above; many tokens (above 192; 128 where
   more than 2 ranks share the GPU, 32 with more than 4) in blocks of 64 threads behind a kernel that waits; fewer in blocks that wait, of 256 threads
   (512 to 16 tokens at up to 4 ranks, above where more than 2 share the GPU, and with --sms), never more than run at once on the rank's share of the GPU.
Grids whose blocks wait for peers never get more blocks than the registry of the device allows. Results do not depend on any of it.";

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensor::DType;

    fn key(hidden: usize) -> Key {
        let config = Config::new(hidden, DType::BF16, 256, 8, 4096);
        Key::new(TablePhase::Dispatch, &config, &config.plan(2).unwrap(), 2, None)
    }

    fn table(gpu: &str) -> Table {
        let row = |tokens, blocks, threads| Row { key: key(7168), tokens, blocks, threads, seconds: 1e-5, before_seconds: 2e-5 };
        let rows = vec![row(4096, 800, 256), row(1024, 300, 256), row(2048, 1, 512), row(128, 60, 128)];
        Table { gpu: gpu.into(), arch: "sm_90".into(), provenance: Provenance::default(), rows }
    }

    #[test]
    fn the_nearest_row_of_a_class_is_taken() {
        table("a made-up GPU").install();
        let found = Measured::find("a made-up GPU", &key(7168));
        assert_eq!(Class::ALL.map(|class| found.threads(class)), [None, Some(128), Some(256)]);
        let blocks = |tokens| found.blocks(tokens, Class::of(tokens));
        assert_eq!(
            [1, 17, 512, 513, 1999, 2100, 100_000].map(blocks),
            [None, Some(8), Some(240), Some(151), Some(586), Some(411), Some(19532)]
        );
        assert_eq!(Class::ALL.map(|class| found.most_blocks(class)), [0, 240, 1_258_291_200]);
        // Where the middle class ends before them, 128 tokens are many.
        let found = Measured::within("a made-up GPU", &key(7168), 64);
        assert_eq!(Class::ALL.map(|class| found.threads(class)), [None, None, Some(256)]);
        assert_eq!(found.blocks(128, Class::Many), Some(38));
        // Another GPU, another shape.
        assert_eq!(Measured::find("NVIDIA H100", &key(7168)).threads(Class::Many), None);
        assert_eq!(Measured::find("a made-up GPU", &key(4096)).threads(Class::Many), None);
    }

    #[test]
    fn every_row_that_is_shipped_is_used() {
        for table in Table::shipped() {
            for row in &table.rows {
                assert_eq!(row.key.phase, TablePhase::Dispatch, "whose classes are those of tokens");
                let (found, class) = (Measured::find(&table.gpu, &row.key), Class::of(row.tokens));
                assert_eq!((found.threads(class), found.blocks(row.tokens, class)), (Some(row.threads), Some(row.blocks)), "{row:?}");
            }
        }
    }

    #[test]
    fn tables_are_text() {
        let table = table("x");
        let text = serde_json::to_string(&table).unwrap();
        assert_eq!(Table::parse(&text).unwrap(), table);
        let refused = |from: &str, to: &str| Table::parse(&text.replacen(from, to, 1)).unwrap_err().to_string();
        assert!(refused("\"threads\":256", "\"threads\":100").contains("800x100"));
        assert!(refused("\"blocks\":800", "\"blocks\":0").contains("0x256"));
        assert!(refused("\"rows\"", "\"lines\"").contains("moe tune"));
        assert_eq!(Table::shipped().len(), SHIPPED.len());
    }
}
