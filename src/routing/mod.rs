//! Which token goes to which expert: routers, synthetic routing, recorded routing, and their statistics.

pub mod placement;
pub mod router;
pub mod statistics;
pub mod synthetic;
pub mod trace;

mod routes;

pub use placement::Placement;
pub use router::{Family, Groups, KeptInF32, RouterConfig, route};
pub use routes::{MAX_K, Routes};
pub use statistics::Load;
pub use trace::Trace;
