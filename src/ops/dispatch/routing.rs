//! Where every token of a call went, kept for combine and replay.

use crate::ep::ExpertParallel;

/// Where every token of a call went and where every received row came from. Its memory is allocated once, by [`Routing::new`]; it can be kept
/// (60 layers, until backward) and used again.
pub struct Routing {}

impl Routing {
    /// Memory for any call of an object with this configuration.
    pub fn new(ep: &ExpertParallel) -> Self {
        let _ = ep;
        todo!()
    }

    /// Bytes that [`Routing::new`] allocates.
    pub fn bytes(ep: &ExpertParallel) -> usize {
        let _ = ep;
        todo!()
    }

    /// Tokens of the call on this rank.
    pub fn num_tokens(&self) -> usize {
        todo!()
    }

    /// Rows of this rank's tokens that receivers dropped ([`Overflow::Drop`](crate::ep::Overflow::Drop)).
    pub fn num_dropped(&self) -> usize {
        todo!()
    }
}
