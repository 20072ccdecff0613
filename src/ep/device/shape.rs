//! What every kernel of an object is compiled for, and where its text begins.
#![forbid(unsafe_code)]

use std::fmt;
use std::marker::PhantomData;

use super::registry::Waiting;
use crate::ep::{Config, IdSpace, Layout, Overflow, Plan};
use crate::error::Result;
use crate::gpu::{Constant, Device, Geometry, Kernel, Kernels, Spec};

/// The sources of a kernel of expert parallelism, in their order, then its own.
macro_rules! ep_sources {
    ($($own:literal),+) => {
        &[
            $crate::kernel_source!("gpu/device/platform.cuh"),
            $crate::kernel_source!("gpu/device/float.cuh"),
            $crate::kernel_source!("gpu/device/fp8.cuh"),
            $crate::kernel_source!("gpu/device/sync.cuh"),
            $crate::kernel_source!("gpu/device/lanes.cuh"),
            $crate::kernel_source!("gpu/device/rows.cuh"),
            $crate::kernel_source!("gpu/device/blocks.cuh"),
            $crate::kernel_source!("gpu/device/bulk.cuh"),
            $crate::kernel_source!("ep/layout.cuh"),
            $($crate::kernel_source!($own)),+
        ]
    };
}
pub(crate) use ep_sources;

/// Ranks, experts, layout: the constants that all kernels of an object have in common.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Shape {
    pub world: u8,
    pub k: u8,
    pub by_expert: ByExpert,
    pub has_map: bool,
    pub local_ids: bool,
    pub may_drop: bool,
    pub num_experts: u32,
}

/// What a kernel looks at of a [`Shape`], beside the number of ranks.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Uses {
    /// Routes of a token.
    pub k: bool,
    /// Where signal words and counts are, and whether rows are those of experts.
    pub words: bool,
    /// Which of the expert layouts it is.
    pub fixed: bool,
    /// Owners of experts.
    pub owners: bool,
    pub local_ids: bool,
    pub may_drop: bool,
}

impl Uses {
    pub const NOTHING: Uses = Uses { k: false, words: false, fixed: false, owners: false, local_ids: false, may_drop: false };
}

/// `BY_EXPERT` of layout.cuh.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum ByExpert {
    /// `ByToken`.
    No = 0,
    /// `ByExpert`.
    Packed = 1,
    /// `ByExpertFixed`.
    Fixed = 2,
}

impl Shape {
    /// Of a configuration that has a plan: its numbers are in the ranges of their types.
    pub fn new(c: &Config, p: &Plan) -> Self {
        Shape {
            world: p.world as u8,
            k: c.k as u8,
            by_expert: match c.layout {
                Layout::ByToken => ByExpert::No,
                Layout::ByExpert { .. } => ByExpert::Packed,
                Layout::ByExpertFixed { .. } => ByExpert::Fixed,
            },
            has_map: c.expert_map.is_some(),
            local_ids: c.id_space == IdSpace::Local,
            may_drop: c.overflow == Overflow::Drop,
            num_experts: c.num_experts as u32,
        }
    }

    /// Without what a kernel does not look at: configurations that differ in nothing else share it.
    pub fn only(self, uses: Uses) -> Self {
        let by_expert = match self.by_expert {
            ByExpert::Fixed if !uses.fixed => ByExpert::Packed,
            other => other,
        };
        // Where the words of an expert layout are depends on the number of experts.
        let has_experts = uses.owners || uses.words && self.is_by_expert();
        Shape {
            world: self.world,
            k: if uses.k { self.k } else { 0 },
            by_expert: if uses.words { by_expert } else { ByExpert::No },
            has_map: self.has_map && uses.owners,
            local_ids: self.local_ids && uses.local_ids,
            may_drop: self.may_drop && uses.may_drop,
            num_experts: if has_experts { self.num_experts } else { 0 },
        }
    }

    /// The constants of layout.cuh. A number that the kernel does not look at is 1.
    pub fn constants(&self) -> Vec<Constant> {
        vec![
            Constant::Int("WORLD", self.world.into()),
            Constant::Int("NUM_EXPERTS", self.num_experts.max(1).into()),
            Constant::Int("K", self.k.max(1).into()),
            Constant::Bool("HAS_MAP", self.has_map),
            Constant::Int("BY_EXPERT", self.by_expert as i64),
            Constant::Bool("LOCAL_IDS", self.local_ids),
        ]
    }

    pub fn is_by_expert(&self) -> bool {
        self.by_expert != ByExpert::No
    }

    /// Ranks to which a token goes at most.
    pub fn num_destinations(&self) -> u32 {
        u32::from(self.k.min(self.world))
    }
}

/// For names of kernels: `8 ranks, 256 experts, k 8`, then what is unusual.
impl fmt::Display for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Shape { world, k, by_expert, has_map, local_ids, may_drop, num_experts } = *self;
        write!(f, "{world} ranks")?;
        for (number, before, after) in [(num_experts, "", " experts"), (k.into(), "k ", "")] {
            if number > 0 {
                write!(f, ", {before}{number}{after}")?;
            }
        }
        f.write_str(match by_expert {
            ByExpert::No => "",
            ByExpert::Packed => ", by expert",
            ByExpert::Fixed => ", by expert fixed",
        })?;
        for (is_so, text) in [(has_map, ", map"), (local_ids, ", local ids"), (may_drop, ", drop")] {
            f.write_str(if is_so { text } else { "" })?;
        }
        Ok(())
    }
}

/// A kernel that is loaded, the struct of parameters that it takes, and how it is launched.
#[derive(Debug)]
pub(crate) struct Loaded<P> {
    pub kernel: Kernel,
    pub threads: u32,
    /// Blocks of it that run at once on the share of the device that a rank has.
    pub most_blocks: u32,
    parameters: PhantomData<fn(P)>,
}

impl<P> Clone for Loaded<P> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<P> Copy for Loaded<P> {}

impl<P> Loaded<P> {
    /// Compiles and loads the kernel of `spec`, which takes `P`, unless it is loaded.
    pub fn load<S: Spec>(kernels: &Kernels<S>, device: &Device, ranks_on_device: u32, spec: S) -> Result<Self> {
        let (kernel, _) = kernels.load(device, spec)?;
        let program = spec.program();
        let at_once = kernel.max_active_blocks(device, program.threads, program.smem_bytes)? * device.num_sms();
        let most_blocks = (at_once / ranks_on_device.max(1)).max(1);
        Ok(Loaded { kernel, threads: program.threads, most_blocks, parameters: PhantomData })
    }

    /// What its grids of at most `blocks` blocks, which wait for peers, take of a device.
    pub fn waiting(&self, device: &Device, name: &'static str, blocks: u32, is_fixed: bool) -> Result<Waiting> {
        let geometry = Geometry { threads: self.threads, ..Geometry::default() };
        Ok(Waiting { is_fixed, ..Waiting::of(name, device, &self.kernel, &geometry, blocks)? })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::id::Rank;
    use crate::tensor::DType;

    #[test]
    fn constants_follow_the_configuration() {
        let config = Config {
            layout: Layout::ByExpertFixed { rows_per_expert: 3 },
            expert_map: Some(vec![Rank(0); 6]),
            overflow: Overflow::Drop,
            ..Config::new(128, DType::BF16, 6, 2, 10)
        };
        let shape = Shape::new(&config, &config.plan(2).unwrap());
        let text: Vec<String> = shape.constants().iter().map(Constant::to_string).collect();
        assert_eq!(text[0], "constexpr long long WORLD = 2;");
        assert_eq!(
            text[3..],
            ["constexpr bool HAS_MAP = true;", "constexpr long long BY_EXPERT = 2;", "constexpr bool LOCAL_IDS = false;"]
        );
        assert_eq!(shape.to_string(), "2 ranks, 6 experts, k 2, by expert fixed, map, drop");
        assert_eq!(shape.num_destinations(), 2);
    }
    #[test]
    fn configurations_share_kernels() {
        let of = |c: Config| Shape::new(&c, &c.plan(2).unwrap());
        let base = || Config::new(128, DType::BF16, 6, 2, 10);
        let (here, there) = (of(base()), of(Config { num_experts: 8, overflow: Overflow::Drop, id_space: IdSpace::Local, ..base() }));
        let words = Uses { words: true, k: true, ..Uses::NOTHING };
        assert_eq!(here.only(words), there.only(words));
        assert_eq!(here.only(words).to_string(), "2 ranks, k 2");
        for other in [Uses { may_drop: true, ..words }, Uses { local_ids: true, ..words }, Uses { owners: true, ..words }] {
            assert_ne!(here.only(other), there.only(other), "{other:?}");
        }
        // By expert the words' places follow the number of experts.
        let by_expert = |num_experts, layout| of(Config { num_experts, layout, ..base() });
        let (packed, fixed) = (Layout::ByExpert { segment_align: 4 }, Layout::ByExpertFixed { rows_per_expert: 9 });
        assert_ne!(by_expert(6, packed).only(words), by_expert(8, packed).only(words));
        assert_eq!(by_expert(6, packed).only(words), by_expert(6, fixed).only(words));
        assert_ne!(by_expert(6, packed).only(Uses { fixed: true, ..words }), by_expert(6, fixed).only(Uses { fixed: true, ..words }));
    }
}
