//! Time of work on a GPU: replayed in a graph, queued call by call, and what a call costs the host.
#![forbid(unsafe_code)]

use std::time::Instant;

use super::Statistics;
use crate::error::{Error, Result};
use crate::gpu::{Event, Graph, Stream};

const OP: &str = "timing";

/// Replays before those that are timed (arbitrary: the stream is busy and the clocks have risen).
const NUM_WARMUP: usize = 3;

/// How often a measurement is repeated when the host fell behind the GPU (arbitrary: one interruption of the host is no reason to give up).
const NUM_ATTEMPTS: usize = 3;

/// Most calls that are queued without waiting while the host's time is taken (arbitrary, but well below the about 1000 launches after which
/// NVIDIA's driver makes the host wait).
pub const MAX_QUEUED: usize = 256;

/// A graph of equal calls, ready to be timed.
#[derive(Debug)]
pub struct Replay {
    graph: Graph,
    num_nodes: usize,
}

impl Replay {
    /// Calls `node(0)`, .. `node(num_nodes - 1)` once as they are, which compiles kernels and warms up, and once more into a graph. `node` queues one unit of
    /// work on `stream`; its argument chooses among rotated buffers, see [`rotation`].
    ///
    /// # Errors
    /// Those of `node`, [`Error::Gpu`], [`Error::Invalid`] for no node.
    pub fn capture(stream: &Stream, mut node: impl FnMut(usize) -> Result<()>, num_nodes: usize) -> Result<Self> {
        if num_nodes == 0 {
            return Err(Error::invalid(OP, "num_nodes", 0, "at least 1"));
        }
        let mut all = || (0..num_nodes).try_for_each(&mut node);
        all()?;
        stream.synchronize()?;
        Ok(Replay { graph: Graph::capture(stream, all)?, num_nodes })
    }

    /// Seconds per node, one sample a replay.
    ///
    /// The replays are queued one behind the other with an event between two: the GPU never waits for the host, so a sample holds no cost of
    /// launching the graph from the host, only the GPU's own step from one graph to the next, shared by the nodes of one.
    ///
    /// # Errors
    /// [`Error::Gpu`]. [`Error::Invalid`] for no replay, and when the GPU was done before the host had queued everything: then a sample would be the
    /// host's time, and a graph of more nodes is needed.
    pub fn time(&self, stream: &Stream, num_replays: usize) -> Result<Vec<f64>> {
        if num_replays == 0 {
            return Err(Error::invalid(OP, "num_replays", 0, "at least 1"));
        }
        let events: Vec<Event> = (0..=num_replays).map(|_| Event::new(stream.device())).collect::<Result<_>>()?;
        for _ in 0..NUM_ATTEMPTS {
            for _ in 0..NUM_WARMUP {
                self.graph.launch(stream)?;
            }
            events[0].record(stream)?;
            for event in &events[1..] {
                self.graph.launch(stream)?;
                event.record(stream)?;
            }
            let is_starved = stream.is_idle()?;
            stream.synchronize()?;
            if !is_starved {
                return events.windows(2).map(|pair| Ok(pair[1].seconds_since(&pair[0])? / self.num_nodes as f64)).collect();
            }
        }
        Err(Error::invalid(OP, "num_nodes", self.num_nodes, "more: the GPU runs this graph faster than the host queues it"))
    }
}

/// Seconds per node of a graph of `num_nodes` calls of `node`, over `num_replays` replays. The formula of every device time in this crate; see
/// [`Replay`].
///
/// ```no_run
/// use moe_kernels::gpu::{Buffer, Device, Stream};
/// use moe_kernels::measure::timing::graph_replay;
///
/// let device = Device::open(0)?;
/// let stream = Stream::new(&device)?;
/// let buffer = Buffer::new(&device, 1 << 28)?;
/// let fill = graph_replay(&stream, |_| buffer.fill(&stream, 0, 1 << 28, 7), 20, 25)?;
/// println!("{} us", fill.median * 1e6);
/// # Ok::<(), moe_kernels::Error>(())
/// ```
///
/// # Errors
/// Those of [`Replay::capture`] and [`Replay::time`].
pub fn graph_replay(stream: &Stream, node: impl FnMut(usize) -> Result<()>, num_nodes: usize, num_replays: usize) -> Result<Statistics> {
    statistics(&Replay::capture(stream, node, num_nodes)?.time(stream, num_replays)?)
}

/// Seconds per call of `num_calls` calls queued in a row by the host, between two events, `num_rounds` times: what code without graphs sees. Small
/// calls are bound by the host.
///
/// # Errors
/// Those of `call`, [`Error::Gpu`], [`Error::Invalid`] for no call or no round.
pub fn eager(stream: &Stream, call: impl FnMut(usize) -> Result<()>, num_calls: usize, num_rounds: usize) -> Result<Statistics> {
    statistics(&eager_samples(stream, call, num_calls, num_rounds)?)
}

/// The samples of [`eager`], one a round.
///
/// # Errors
/// Those of [`eager`].
pub fn eager_samples(stream: &Stream, mut call: impl FnMut(usize) -> Result<()>, num_calls: usize, num_rounds: usize) -> Result<Vec<f64>> {
    at_least_one("num_calls", num_calls)?;
    at_least_one("num_rounds", num_rounds)?;
    let (start, end) = (Event::new(stream.device())?, Event::new(stream.device())?);
    let mut round = || {
        start.record(stream)?;
        (0..num_calls).try_for_each(&mut call)?;
        end.record(stream)?;
        stream.synchronize()?;
        Ok(end.seconds_since(&start)? / num_calls as f64)
    };
    let _: f64 = round()?;
    (0..num_rounds).map(|_| round()).collect()
}

/// Seconds that a call takes the host, the mean of `num_calls` (at most [`MAX_QUEUED`]) calls in a row, `num_rounds` times. The stream is empty before
/// each round, so no call waits for the GPU.
///
/// # Errors
/// Those of `call`, [`Error::Gpu`], [`Error::Invalid`] for no call, more than [`MAX_QUEUED`], or no round.
pub fn host_cost(stream: &Stream, mut call: impl FnMut(usize) -> Result<()>, num_calls: usize, num_rounds: usize) -> Result<Statistics> {
    at_least_one("num_calls", num_calls)?;
    at_least_one("num_rounds", num_rounds)?;
    if num_calls > MAX_QUEUED {
        return Err(Error::invalid(OP, "num_calls", num_calls, format!("at most {MAX_QUEUED}, so that the stream does not fill")));
    }
    let mut round = || {
        stream.synchronize()?;
        let start = Instant::now();
        (0..num_calls).try_for_each(&mut call)?;
        Ok(start.elapsed().as_secs_f64() / num_calls as f64)
    };
    let _: f64 = round()?;
    let samples: Vec<f64> = (0..num_rounds).map(|_| round()).collect::<Result<_>>()?;
    stream.synchronize()?;
    statistics(&samples)
}

/// How many buffers take turns.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
pub struct Rotation {
    /// Copies of what one call reads and writes.
    pub num_copies: usize,
    /// `false` when the copies were limited and fit the cache: then the time is that of cached data, and should be called so.
    pub is_beyond_cache: bool,
}

/// The fewest copies of `call_bytes` that exceed twice the L2 cache, so that each call finds its data in memory; at least 1, at most `max_copies`.
///
/// ```
/// use moe_kernels::measure::timing::{Rotation, rotation};
///
/// assert_eq!(rotation(10, 100, 64), Rotation { num_copies: 21, is_beyond_cache: true });
/// assert_eq!(rotation(10, 100, 8), Rotation { num_copies: 8, is_beyond_cache: false });
/// ```
pub fn rotation(call_bytes: u64, l2_bytes: u64, max_copies: usize) -> Rotation {
    let beyond = u128::from(l2_bytes) * 2 + 1;
    let needed = beyond.div_ceil(u128::from(call_bytes.max(1)));
    let num_copies = usize::try_from(needed).unwrap_or(usize::MAX).min(max_copies).max(1);
    Rotation { num_copies, is_beyond_cache: num_copies as u128 >= needed }
}

fn at_least_one(what: &str, num: usize) -> Result<()> {
    if num == 0 { Err(Error::invalid(OP, what, 0, "at least 1")) } else { Ok(()) }
}

fn statistics(samples: &[f64]) -> Result<Statistics> {
    Statistics::of(samples).ok_or_else(|| Error::invalid(OP, "samples", format!("{samples:?}"), "at least one, and each a number"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copies_exceed_twice_the_cache() {
        let of = |bytes, l2, max| (rotation(bytes, l2, max).num_copies, rotation(bytes, l2, max).is_beyond_cache);
        // Exactly twice is not beyond.
        assert_eq!([of(50, 100, 99), of(51, 100, 99), of(200, 100, 99), of(201, 100, 99)], [(5, true), (4, true), (2, true), (1, true)]);
        assert_eq!([of(0, 100, 7), of(4096, 60 << 20, 200), of(50, 100, 0)], [(7, false), (200, false), (1, false)]);
        assert_eq!([of(8, 0, 5), of(1, u64::MAX, usize::MAX), of(u64::MAX, u64::MAX, 9)], [(1, true), (usize::MAX, false), (3, true)]);
    }
}
