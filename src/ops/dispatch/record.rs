//! The metadata that travels with a row, and where it is in memory. All fields are 4 bytes, little endian as every supported device.
//!
//! - A row's record: source rank, source token, ids `[row_k]`, weights `[row_k]`, then its scales unless they are column-major.
//! - A transit record (expert layouts), one per (token, rank): source rank, source token, ids `[K]` of that rank's experts (else -1), weights
//!   `[K]`, positions `[K]` among the sender's rows of each expert, then the scales.
#![forbid(unsafe_code)]

/// Source rank and token.
const HEADER: usize = 8;

/// Writes consecutive 4-byte fields.
pub(crate) struct Writer<'a> {
    bytes: &'a mut [u8],
    at: usize,
}

impl<'a> Writer<'a> {
    pub fn new(bytes: &'a mut [u8]) -> Self {
        Writer { bytes, at: 0 }
    }

    pub fn i32(&mut self, value: i32) {
        self.bytes[self.at..][..4].copy_from_slice(&value.to_le_bytes());
        self.at += 4;
    }

    pub fn f32(&mut self, value: f32) {
        self.i32(value.to_bits() as i32);
    }

    pub fn bytes(&mut self, bytes: &[u8]) {
        self.bytes[self.at..][..bytes.len()].copy_from_slice(bytes);
        self.at += bytes.len();
    }
}

/// Reads a record of `k` routes.
#[derive(Clone, Copy)]
pub(crate) struct Reader<'a> {
    bytes: &'a [u8],
    k: usize,
}

impl<'a> Reader<'a> {
    pub fn new(bytes: &'a [u8], k: usize) -> Self {
        Reader { bytes, k }
    }

    fn field(&self, at: usize) -> i32 {
        let b = &self.bytes[at..][..4];
        i32::from_le_bytes([b[0], b[1], b[2], b[3]])
    }

    /// Source rank and token; -1 and -1 for padding.
    pub fn source(&self) -> (i32, i32) {
        (self.field(0), self.field(4))
    }

    pub fn id(&self, route: usize) -> i32 {
        self.field(HEADER + 4 * route)
    }

    pub fn weight(&self, route: usize) -> f32 {
        f32::from_bits(self.field(HEADER + 4 * (self.k + route)) as u32)
    }

    /// Ids of all routes.
    pub fn ids(&self) -> &'a [i32] {
        bytemuck::cast_slice(&self.bytes[HEADER..][..4 * self.k])
    }

    /// Weights of all routes.
    pub fn weights(&self) -> &'a [f32] {
        bytemuck::cast_slice(&self.bytes[HEADER + 4 * self.k..][..4 * self.k])
    }

    /// Transit records: position among the sender's rows of the expert.
    pub fn position(&self, route: usize) -> u32 {
        self.field(HEADER + 4 * (2 * self.k + route)) as u32
    }

    /// Transit records: the scale bytes.
    pub fn transit_scales(&self, len: usize) -> &'a [u8] {
        &self.bytes[HEADER + 12 * self.k..][..len]
    }
}

/// Offset of the scales in a row's record.
pub(crate) fn row_scales_offset(row_k: usize) -> usize {
    HEADER + 8 * row_k
}

/// Offset of the ids in a record; the weights are behind them.
pub(crate) fn ids_offset() -> usize {
    HEADER
}

/// Bytes from one route's id to its weight, for each route of the record.
pub(crate) const WEIGHTS_BEHIND: usize = 4;
