//! Whether any of many tensors share bytes.
#![forbid(unsafe_code)]

/// The bytes under a tensor: rows of one length at equal distances.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Region {
    start: u64,
    num_rows: u64,
    row_bytes: u64,
    stride: u64,
}

impl Region {
    /// Of at least one row and one byte. Rows that touch or overlap are one.
    pub(super) fn new(start: u64, num_rows: u64, row_bytes: u64, stride: u64) -> Self {
        if num_rows > 1 && stride > row_bytes {
            return Region { start, num_rows, row_bytes, stride };
        }
        let bytes = (num_rows - 1) * stride + row_bytes;
        Region { start, num_rows: 1, row_bytes: bytes, stride: bytes }
    }

    fn end(&self) -> u64 {
        self.start + (self.num_rows - 1) * self.stride + self.row_bytes
    }

    /// Whether a byte belongs to both.
    fn meets(&self, other: &Region) -> bool {
        let (a, b) = if self.start <= other.start { (self, other) } else { (other, self) };
        if b.start >= a.end() {
            return false;
        }
        if a.num_rows == 1 {
            return true; // b starts inside of it
        }
        if a.stride == b.stride || b.num_rows == 1 && b.row_bytes <= a.stride {
            // All rows of b lie in a's as its first does: in a row, or behind one that is not the last.
            let at = (b.start - a.start) % a.stride;
            return at < a.row_bytes || at + b.row_bytes > a.stride;
        }
        // Rows of both by their places.
        let (mut i, mut j) = (0, 0);
        while i < a.num_rows && j < b.num_rows {
            let (of_a, of_b) = (a.start + i * a.stride, b.start + j * b.stride);
            if of_a < of_b + b.row_bytes && of_b < of_a + a.row_bytes {
                return true;
            }
            if of_a < of_b { i += 1 } else { j += 1 }
        }
        false
    }
}

/// A tensor and what to call it.
pub(super) type Named<N> = (Region, N);

/// Two that share bytes: an output and another output or an input. By sorting: the time of n tensors that lie apart grows as n log n; only tensors whose rows
/// stand between each other's are compared one by one.
pub(super) fn shared<N: Copy>(outputs: &mut [Named<N>], inputs: &[Named<N>]) -> Option<(N, N)> {
    outputs.sort_unstable_by_key(|(region, _)| region.start);
    for (i, (a, name)) in outputs.iter().enumerate() {
        let near = outputs[i + 1..].iter().take_while(|(b, _)| b.start < a.end());
        if let Some((_, other)) = near.into_iter().find(|(b, _)| a.meets(b)) {
            return Some((*other, *name));
        }
    }
    // Where the furthest of the outputs up to each one ends: behind that none of them reaches.
    let reach: Vec<u64> = outputs
        .iter()
        .scan(0, |reach: &mut u64, (region, _)| {
            *reach = region.end().max(*reach);
            Some(*reach)
        })
        .collect();
    inputs.iter().find_map(|(input, name)| {
        let num = outputs.partition_point(|(output, _)| output.start < input.end());
        let near = (0..num).rev().take_while(|&i| reach[i] > input.start);
        near.map(|i| &outputs[i]).find(|(output, _)| output.meets(input)).map(|(_, output)| (*output, *name))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::SplitMix64;
    use std::time::Instant;

    fn bytes(region: &(u64, u64, u64, u64)) -> Vec<u64> {
        let &(start, num_rows, row_bytes, stride) = region;
        (0..num_rows).flat_map(|i| start + i * stride..start + i * stride + row_bytes).collect()
    }

    #[test]
    fn regions_meet_when_a_byte_is_in_both() {
        let mut random = SplitMix64::new(1);
        let mut counts = [0; 2];
        for round in 0..200_000 {
            let mut region = |stride: Option<u64>| {
                (random.below(40), 1 + random.below(5), 1 + random.below(6), stride.unwrap_or_else(|| random.below(14)))
            };
            let (a, b) = (region(None), region(None));
            // Half of them with one stride: columns of one buffer.
            let b = if round % 2 == 0 { (b.0, b.1, b.2, a.3) } else { b };
            // Rows that overlap themselves are one, with the gaps that they may leave.
            let filled = |r: (u64, u64, u64, u64)| if r.3 <= r.2 { (r.0, 1, (r.1 - 1) * r.3 + r.2, 0) } else { r };
            let want = bytes(&filled(a)).iter().any(|byte| bytes(&filled(b)).contains(byte));
            let of = |r: (u64, u64, u64, u64)| Region::new(r.0, r.1, r.2, r.3);
            assert_eq!((of(a).meets(&of(b)), of(b).meets(&of(a))), (want, want), "{a:?} {b:?}");
            counts[usize::from(want)] += 1;
        }
        assert!(counts.iter().all(|count| *count > 20_000), "{counts:?}");
    }

    #[test]
    fn one_pair_among_many_is_found() {
        let mut random = SplitMix64::new(2);
        let region = |i: u64| Region::new(1000 + 100 * i, 1, 100, 100);
        for round in 0..200 {
            let num = 1 + random.below(40);
            let mut outputs: Vec<Named<u64>> = (0..num).map(|i| (region(2 * i), i)).collect();
            let mut inputs: Vec<Named<u64>> = (0..num).map(|i| (region(2 * i + 1), 100 + i)).collect();
            // Inputs may be the same.
            inputs.push((region(1), 100));
            for i in (1..outputs.len()).rev() {
                outputs.swap(i, random.below(i as u64 + 1) as usize);
            }
            assert_eq!(shared(&mut outputs.clone(), &inputs), None);
            // From before an output or inside of it on, to its first byte at least.
            let at = 1000 + 200 * random.below(num) + random.below(190) - 90;
            let extra = Region::new(at, 1, 91 + random.below(200), 0);
            let is_output = round % 2 == 0;
            if is_output {
                outputs.push((extra, 999))
            } else {
                inputs.push((extra, 999))
            }
            let (a, b) = shared(&mut outputs, &inputs).expect("two that overlap");
            // Whichever pair it names, it is one.
            let find = |name| outputs.iter().chain(&inputs).find(|(_, n)| *n == name).expect("named").0;
            assert!(find(a).meets(&find(b)) && (a == 999 || b == 999), "{a} {b}");
        }
    }

    #[test]
    fn many_take_little_longer_than_few() {
        let seconds = |num: u64| {
            let all = |at: u64| (0..num).map(move |i| (Region::new(1 << 40 | i << 20 | at, 64, 100, 200), i));
            let (mut outputs, inputs): (Vec<_>, Vec<_>) = (all(0).chain(all(1 << 18)).collect(), all(1 << 19).collect());
            let start = Instant::now();
            assert_eq!(shared(&mut outputs, &inputs), None);
            start.elapsed().as_secs_f64()
        };
        // 64 times as many: 4096 times as long if each were compared with each (1000: arbitrary, a machine that does other things too).
        let best = |num| (0..3).map(|_| seconds(num)).fold(f64::INFINITY, f64::min);
        let (few, many) = (best(1000), best(64_000));
        assert!(many < few * 1000.0, "{many} s, {few} s");
    }
}
