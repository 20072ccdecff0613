//! A whole MoE block: router, dispatch, experts, combine, shared expert.

pub mod block;
pub(crate) mod bytes;
pub mod checkpoint;
pub(crate) mod experts;
pub mod golden;
pub mod memory;
pub mod preset;
pub mod verify;
pub mod weights;

pub use block::{Block, BlockConfig, Report, RouteSource, Stage};
pub use checkpoint::{Architecture, Checkpoint, Model, MoeLayer, TensorFile};
pub use golden::{Comparison, Distance, Golden, Recording};
pub use memory::Memory;
pub use preset::{PRESETS, Preset, Shape, TINY};
pub use verify::{TokenCheck, Verifier};
pub use weights::{CommonWeights, ExpertWeights, Matrix, Mlp, tokens_from_seed};
