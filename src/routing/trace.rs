//! Recorded routing of real models: JSON lines.
//!
//! The format: an optional first line `{"type":"meta","num_experts":..}`, then one line for each (token, layer), in file order:
//! `{"type":"route","layer":0,"topk_ids":[3,1],"topk_weights":[0.6,0.4]}`. Other fields (`token_idx`, `req_id`, ..) are ignored: in real files they
//! restart and are no keys.
//!
//! Accepted: LF and CRLF, blank lines, a last line without an end, negative ids (masked: stored as -1 with weight 0), weights of any sign and sum.
//! Refused, with the line: anything that is not UTF-8 or not JSON, a line above 1 MiB, a missing or ill-typed field, another `type`, a `meta` line after the
//! first, ids and weights of different number, a number of ids that changes or exceeds 32, an id beyond the experts, an id twice in a row, a weight that f32
//! does not hold. Every line is checked, also those of layers that were not asked for.
#![forbid(unsafe_code)]

use std::collections::BTreeSet;
use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};

use serde_json::{Map, Value};

use super::placement::MAX_EXPERTS;
use super::routes::{MAX_K, Routes};
use crate::error::{Error, Result};

const OP: &str = "trace";

/// Longest line (arbitrary: 1000 times a real one): a file without line ends does not fill the memory.
pub const MAX_LINE_BYTES: usize = 1 << 20;
/// Shortest run of identical rows that is taken for an engine's warm-up (spec: the project's rule; the runs of real files have thousands).
pub const WARMUP_ROWS: usize = 64;
/// Layers that a message names (arbitrary: the deepest published models have about as many).
const MAX_NAMED_LAYERS: usize = 64;

/// What to take from a trace.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Options {
    /// Experts of the model. `None`: the meta line's `num_experts`, or else the largest id of the layer plus 1.
    pub num_experts: Option<usize>,
    /// The layer to take. `None`: the only one of the file.
    pub layer: Option<u32>,
    /// Keep runs of [`WARMUP_ROWS`] and more identical rows.
    pub keep_warmup: bool,
}

/// One layer of a recorded routing.
#[derive(Debug, Clone, PartialEq)]
pub struct Trace {
    /// The rows, in file order, without warm-up unless it was kept.
    pub routes: Routes,
    /// Experts of the model: see [`Options::num_experts`].
    pub num_experts: usize,
    /// The layer of the rows.
    pub layer: u32,
    /// Rows of the layer that are in runs of [`WARMUP_ROWS`] and more identical ones, left out or not.
    pub num_warmup: usize,
    /// Rows of the layer in the file.
    pub num_rows: usize,
}

impl Trace {
    /// Reads a file.
    ///
    /// # Errors
    /// [`Error::Io`] when it cannot be read, and those of [`parse`].
    pub fn read(path: impl AsRef<Path>, options: &Options) -> Result<Self> {
        let path = path.as_ref();
        let file = File::open(path).map_err(|e| Error::Io { what: format!("opening {}", path.display()), why: e.to_string() })?;
        parse(BufReader::new(file), path, options)
    }

    /// The first `num_tokens` rows; the trace starts again when it has fewer.
    ///
    /// # Errors
    /// [`Error::Invalid`] when tokens are wanted and no row is left without the warm-up.
    pub fn tokens(&self, num_tokens: usize) -> Result<Routes> {
        let Routes { topk_idx, topk_weights, num_tokens: rows, k } = &self.routes;
        if num_tokens > 0 && *rows == 0 {
            let got = format!("0, {} left out as warm-up", self.num_warmup);
            return Err(Error::invalid(OP, "number of rows", got, "at least 1 (the warm-up can be kept)"));
        }
        let len = num_tokens.checked_mul(*k).filter(|len| len.checked_mul(8).is_some_and(|bytes| bytes <= isize::MAX as usize));
        let Some(len) = len else {
            return Err(Error::invalid(OP, "num_tokens", num_tokens, "a table of at most isize::MAX bytes"));
        };
        Ok(Routes {
            topk_idx: topk_idx.iter().copied().cycle().take(len).collect(),
            topk_weights: topk_weights.iter().copied().cycle().take(len).collect(),
            num_tokens,
            k: *k,
        })
    }
}

/// Parses a trace; `name` stands for the file in messages.
///
/// Weights are read as f64 and rounded to f32.
///
/// # Errors
/// [`Error::Format`] with the line (from 1) and the field for a bad line; [`Error::Io`] when reading fails; [`Error::Invalid`] for bad options, among them
/// a layer that the file does not have.
///
/// ```
/// use moe_kernels::routing::trace::{Options, parse};
/// let file = br#"{"type":"route","layer":3,"topk_ids":[5,0],"topk_weights":[0.75,0.25]}"#;
/// let trace = parse(&file[..], "example".as_ref(), &Options::default())?;
/// assert_eq!((trace.layer, trace.num_experts, &trace.routes.topk_idx[..]), (3, 6, &[5, 0][..]));
/// # Ok::<(), moe_kernels::Error>(())
/// ```
pub fn parse(reader: impl BufRead, name: &Path, options: &Options) -> Result<Trace> {
    if let Some(n) = options.num_experts.filter(|n| !(1..=MAX_EXPERTS).contains(n)) {
        return Err(Error::invalid(OP, "num_experts", n, format!("1 to {MAX_EXPERTS}")));
    }
    let mut lines = Lines { reader, name, number: 0, buffer: Vec::new() };
    let mut rows = Rows::new(options);
    while let Some(line) = lines.next()? {
        rows.line(line).map_err(|why| lines.bad(why))?;
    }
    rows.finish(&lines)
}

/// Why a line is bad, with its field.
type Why = String;

/// Lines of bounded length.
struct Lines<'a, R> {
    reader: R,
    name: &'a Path,
    /// Of the line last returned, from 1.
    number: u64,
    buffer: Vec<u8>,
}

impl<R: BufRead> Lines<'_, R> {
    /// The next line that is not blank.
    fn next(&mut self) -> Result<Option<&[u8]>> {
        loop {
            self.buffer.clear();
            let mut bounded = self.reader.by_ref().take(MAX_LINE_BYTES as u64 + 1);
            let read = bounded.read_until(b'\n', &mut self.buffer);
            let read = read.map_err(|e| Error::Io { what: format!("reading {}", self.name.display()), why: e.to_string() })?;
            if read == 0 {
                return Ok(None);
            }
            self.number += 1;
            if read > MAX_LINE_BYTES {
                return Err(self.bad(format!("the line is longer than {MAX_LINE_BYTES} bytes")));
            }
            if !self.buffer.trim_ascii().is_empty() {
                return Ok(Some(&self.buffer));
            }
        }
    }
}

impl<R> Lines<'_, R> {
    fn bad(&self, why: Why) -> Error {
        Error::Format { path: PathBuf::from(self.name), line: self.number, why }
    }
}

/// The rows of the wanted layer, so far.
struct Rows<'a> {
    options: &'a Options,
    /// Whether a line was read, so that no meta line may follow.
    started: bool,
    meta_experts: Option<usize>,
    layers: BTreeSet<u32>,
    /// Ids of every row of the file.
    k: Option<usize>,
    routes: Routes,
    num_rows: usize,
    num_warmup: usize,
    /// Identical rows at the end of `routes`.
    run: usize,
    largest_id: i32,
}

impl<'a> Rows<'a> {
    fn new(options: &'a Options) -> Self {
        Rows {
            options,
            started: false,
            meta_experts: None,
            layers: BTreeSet::new(),
            k: None,
            routes: Routes::default(),
            num_rows: 0,
            num_warmup: 0,
            run: 0,
            largest_id: -1,
        }
    }

    fn line(&mut self, line: &[u8]) -> Result<(), Why> {
        let text = std::str::from_utf8(line).map_err(|e| format!("not UTF-8 from byte {} on", e.valid_up_to() + 1))?;
        let object: Map<String, Value> = serde_json::from_str(text).map_err(|e| not_json(&e))?;
        let first = !std::mem::replace(&mut self.started, true);
        match field(&object, "type")?.as_str() {
            Some("route") => self.route(&object),
            Some("meta") if first => self.meta(&object),
            Some("meta") => Err("type is \"meta\", expected \"route\": only the first line may be meta".into()),
            _ => Err(format!("type is {}, expected \"route\" or \"meta\"", shown(&object["type"]))),
        }
    }

    fn meta(&mut self, object: &Map<String, Value>) -> Result<(), Why> {
        if let Some(value) = object.get("num_experts") {
            let num_experts = value.as_u64().and_then(|n| usize::try_from(n).ok()).filter(|n| (1..=MAX_EXPERTS).contains(n));
            let want = || format!("num_experts is {}, expected an integer from 1 to {MAX_EXPERTS}", shown(value));
            self.meta_experts = Some(num_experts.ok_or_else(want)?);
        }
        Ok(())
    }

    fn num_experts(&self) -> Option<usize> {
        self.options.num_experts.or(self.meta_experts)
    }

    fn route(&mut self, object: &Map<String, Value>) -> Result<(), Why> {
        let layer = field(object, "layer")?;
        let not_layer = || format!("layer is {}, expected an integer from 0 to {}", shown(layer), u32::MAX);
        let layer = layer.as_u64().and_then(|n| u32::try_from(n).ok()).ok_or_else(not_layer)?;
        let (ids, weights) = (array(object, "topk_ids")?, array(object, "topk_weights")?);
        if ids.len() != weights.len() {
            return Err(format!("topk_weights has {} entries, expected as many as topk_ids, {}", weights.len(), ids.len()));
        }
        if !(1..=MAX_K).contains(&ids.len()) {
            return Err(format!("topk_ids has {} entries, expected 1 to {MAX_K}", ids.len()));
        }
        let k = *self.k.get_or_insert(ids.len());
        if ids.len() != k {
            return Err(format!("topk_ids has {} entries, expected {k} as in the rows before", ids.len()));
        }
        let mut row = ([0i32; MAX_K], [0f32; MAX_K]);
        let (row_ids, row_weights) = (&mut row.0[..k], &mut row.1[..k]);
        for j in 0..k {
            row_ids[j] = self.id(j, &ids[j])?;
            if row_ids[j] >= 0 && row_ids[..j].contains(&row_ids[j]) {
                return Err(format!("topk_ids[{j}] is {}, which the row has already", row_ids[j]));
            }
            let weight = weights[j].as_f64().map(|w| w as f32).filter(|w| w.is_finite());
            let not_weight = || format!("topk_weights[{j}] is {}, expected a number that f32 holds", shown(&weights[j]));
            let weight = weight.ok_or_else(not_weight)?;
            row_weights[j] = if row_ids[j] < 0 { 0.0 } else { weight };
        }
        self.layers.insert(layer);
        if self.options.layer.is_none_or(|wanted| wanted == layer) {
            self.push(row_ids, row_weights);
        }
        Ok(())
    }

    fn id(&self, j: usize, value: &Value) -> Result<i32, Why> {
        let Some(id) = value.as_i64() else { return Err(format!("topk_ids[{j}] is {}, expected an integer", shown(value))) };
        match self.num_experts() {
            Some(n) if id >= n as i64 => Err(format!("topk_ids[{j}] is {id}, expected less than the number of experts, {n}")),
            None if id >= MAX_EXPERTS as i64 => Err(format!("topk_ids[{j}] is {id}, expected less than {MAX_EXPERTS}")),
            _ => Ok(id.max(-1) as i32),
        }
    }

    fn push(&mut self, ids: &[i32], weights: &[f32]) {
        self.num_rows += 1;
        self.largest_id = ids.iter().copied().fold(self.largest_id, i32::max);
        let last = self.routes.num_tokens.wrapping_sub(1);
        if self.run == 0 || self.routes.idx_of(last) != ids || self.routes.weights_of(last) != weights {
            self.end_run();
            self.routes.k = ids.len();
        }
        self.run += 1;
        self.routes.num_tokens += 1;
        self.routes.topk_idx.extend_from_slice(ids);
        self.routes.topk_weights.extend_from_slice(weights);
    }

    fn end_run(&mut self) {
        if self.run >= WARMUP_ROWS {
            self.num_warmup += self.run;
            if !self.options.keep_warmup {
                self.routes.num_tokens -= self.run;
                let len = self.routes.num_tokens * self.routes.k;
                self.routes.topk_idx.truncate(len);
                self.routes.topk_weights.truncate(len);
            }
        }
        self.run = 0;
    }

    fn finish<R>(mut self, lines: &Lines<R>) -> Result<Trace> {
        self.end_run();
        let named: Vec<_> = self.layers.iter().take(MAX_NAMED_LAYERS).map(u32::to_string).collect();
        let named = named.join(", ") + if self.layers.len() > MAX_NAMED_LAYERS { ", .." } else { "" };
        let layer = match (self.options.layer, self.layers.first()) {
            (_, None) => return Err(lines.bad("the file has no route line".into())),
            (Some(layer), _) if self.layers.contains(&layer) => layer,
            (Some(layer), _) => return Err(Error::invalid(OP, "layer", layer, format!("one of {}: {named}", lines.name.display()))),
            (None, Some(&layer)) if self.layers.len() == 1 => layer,
            (None, _) => {
                let got = format!("not chosen, and {} has {}", lines.name.display(), self.layers.len());
                return Err(Error::invalid(OP, "layer", got, format!("one of {named}")));
            }
        };
        let num_experts = self.num_experts().unwrap_or((self.largest_id + 1).max(1) as usize);
        Ok(Trace { routes: self.routes, num_experts, layer, num_warmup: self.num_warmup, num_rows: self.num_rows })
    }
}

fn field<'o>(object: &'o Map<String, Value>, name: &str) -> Result<&'o Value, Why> {
    object.get(name).ok_or_else(|| format!("{name} is missing"))
}

fn array<'o>(object: &'o Map<String, Value>, name: &str) -> Result<&'o Vec<Value>, Why> {
    let value = field(object, name)?;
    value.as_array().ok_or_else(|| format!("{name} is {}, expected an array", shown(value)))
}

/// A value for a message: short, whatever the file holds.
fn shown(value: &Value) -> String {
    match value {
        Value::Array(_) => "an array".into(),
        Value::Object(_) => "an object".into(),
        Value::String(s) if s.chars().count() > 32 => "a long string".into(),
        other => other.to_string(),
    }
}

/// serde_json's reason without its line, which is always 1 here.
fn not_json(error: &serde_json::Error) -> Why {
    let text = error.to_string();
    let reason = text.split(" at line ").next().unwrap_or_default();
    format!("not a JSON object: {reason} at column {}", error.column())
}
