//! The kernels of an object's dispatches, loaded, and the grids of them that wait for peers.
#![forbid(unsafe_code)]

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use rayon::prelude::*;

use super::launch::IndexType;
use super::params::{
    ArrangeParameters, IndexParameters, LowLatencyParameters, PayloadParameters, ReceiveParameters, ReportParameters, RouteParameters,
};
use super::spec::{Done, KERNELS, Spec};
use super::tuning::{Choice, Mapping};
use crate::ep::device::memory::DeviceLayout;
use crate::ep::device::registry::{Settled, Waiting};
use crate::ep::device::shape;
use crate::ep::device::table::{Key, Measured, TablePhase};
use crate::ep::device::tuning::{Class, LANES, Launch, Tokens, Tuning};
use crate::ep::{Config, Plan};
use crate::error::{Error, Result};
use crate::gpu::Device;

/// The kernels of an object's dispatches, loaded.
#[derive(Debug, Clone)]
pub(crate) struct Loaded {
    pub(super) choice: Choice,
    /// By `SMALL`, by type of index.
    pub(super) route: [[shape::Loaded<RouteParameters>; 2]; 2],
    pub(super) replay: shape::Loaded<RouteParameters>,
    pub(super) low_latency: Option<[[shape::Loaded<LowLatencyParameters>; 2]; 2]>,
    pub(super) payload: [shape::Loaded<PayloadParameters>; 3],
    pub(super) receive: shape::Loaded<ReceiveParameters>,
    /// By `REPLAY`, by class.
    pub(super) arrange: Option<[[shape::Loaded<ArrangeParameters>; 3]; 2]>,
    pub(super) index: Option<shape::Loaded<IndexParameters>>,
    pub(super) report: shape::Loaded<ReportParameters>,
    most_waiting: Arc<AtomicU32>,
    is_alone: Arc<AtomicBool>,
}

impl Loaded {
    pub fn load(device: &Device, c: &Config, p: &Plan, layout: &DeviceLayout, ranks_on_device: u32, tuning: Tuning) -> Result<Self> {
        let choice = Choice::new(c, p, layout, (ranks_on_device, device.num_sms()), tuning);
        let key = Key::new(TablePhase::Dispatch, c, p, choice.ranks_on_device, tuning.dispatch.sms);
        let choice = choice.with_measured(Measured::find(&device.properties().name, &key));
        // All at once first; what follows finds them loaded.
        choice.all().into_par_iter().try_for_each(|spec| KERNELS.load(device, spec).map(|_| ()))?;
        fn of<P>(device: &Device, choice: &Choice, spec: Spec) -> Result<shape::Loaded<P>> {
            shape::Loaded::load(&KERNELS, device, choice.ranks_on_device, spec)
        }
        const INDEX: [IndexType; 2] = [IndexType::I32, IndexType::I64];
        let by_index = |small: bool| -> Result<[_; 2]> {
            Ok([of(device, &choice, choice.route(small, INDEX[0]))?, of(device, &choice, choice.route(small, INDEX[1]))?])
        };
        let low_latency = |small: bool| -> Result<[_; 2]> {
            Ok([of(device, &choice, choice.low_latency(small, INDEX[0]))?, of(device, &choice, choice.low_latency(small, INDEX[1]))?])
        };
        let arrange = |replay: bool| -> Result<[_; 3]> {
            let [few, some, many] = Class::ALL.map(|class| of(device, &choice, choice.arrange(replay, class)));
            Ok([few?, some?, many?])
        };
        let [few, some, many] = Class::ALL.map(|class| of(device, &choice, choice.payload(class)));
        Ok(Loaded {
            route: [by_index(false)?, by_index(true)?],
            replay: of(device, &choice, choice.replay())?,
            low_latency: if choice.staged_rows > 0 { Some([low_latency(false)?, low_latency(true)?]) } else { None },
            payload: [few?, some?, many?],
            receive: of(device, &choice, choice.receive())?,
            arrange: if choice.shape.is_by_expert() { Some([arrange(false)?, arrange(true)?]) } else { None },
            index: match choice.index_if_any() {
                Some(spec) => Some(of(device, &choice, spec)?),
                None => None,
            },
            report: of(device, &choice, choice.report())?,
            most_waiting: Arc::new(AtomicU32::new(u32::MAX)),
            is_alone: Arc::new(AtomicBool::new(false)),
            choice,
        })
    }

    /// The grids whose blocks wait for peers.
    pub fn waiting(&self, device: &Device) -> Result<Vec<Waiting>> {
        let (choice, many) = (&self.choice, Tokens::exactly(u32::MAX));
        let is_fixed = self.waits_with_geometry();
        let mut all = Vec::new();
        for kernel in self.route.iter().flatten() {
            all.push(kernel.waiting(device, "route", self.route_blocks(many, kernel), is_fixed)?);
        }
        all.push(self.replay.waiting(device, "route", 1, is_fixed)?);
        for kernel in self.low_latency.iter().flatten().flatten() {
            let measured = if is_fixed { 1 } else { choice.within(choice.measured.most_blocks(Class::Few)) };
            let measured = measured.min(kernel.most_blocks).min(self.most_waiting());
            all.push(kernel.waiting(device, "low_latency", self.low_latency_blocks(many, kernel).max(measured), is_fixed)?);
        }
        let says_itself = |class: &Class| choice.done(*class) == Done::Within;
        for kernel in Class::ALL.iter().filter(|class| says_itself(class)).map(|class| &self.payload[*class as usize]) {
            all.push(kernel.waiting(device, "payload", 1, is_fixed)?);
        }
        all.push(self.receive.waiting(device, "receive", 1, is_fixed)?);
        Ok(all)
    }

    /// How the kernel that moves rows is launched for a call of so many tokens.
    pub fn launches(&self, num_tokens: u32) -> Launch {
        let (choice, tokens, class) = (&self.choice, Tokens::exactly(num_tokens), Class::of(num_tokens));
        if let Some(by_size) = &self.low_latency {
            let small = num_tokens <= choice.small_low_latency_tokens();
            let kernel = &by_size[usize::from(small)][IndexType::I32 as usize];
            let (parts, blocks) = (choice.row.num_vectors().div_ceil(LANES), self.low_latency_blocks(tokens, kernel));
            return Launch { blocks, threads: kernel.threads, parts, unroll: 1, route_blocks: 0, chosen_by: choice.chosen_by(class) };
        }
        let Mapping { threads, split, .. } = choice.payload_mapping(class);
        let small = num_tokens <= choice.small_route_tokens();
        let route_blocks = if small { 1 } else { self.route_blocks(tokens, &self.route[0][IndexType::I32 as usize]) };
        let blocks = choice.payload_blocks(tokens, class);
        Launch { blocks, threads, parts: split.parts.into(), unroll: split.unroll.into(), route_blocks, chosen_by: choice.chosen_by(class) }
    }

    /// Whether rows travel without done words.
    pub fn skips_signals(&self) -> bool {
        self.choice.tuning.measure.skip_signals
    }

    /// So many blocks of grids that wait, unless the caller has said how many.
    pub fn settle(&self, settled: Settled) {
        self.is_alone.store(settled.is_alone, Ordering::Relaxed);
        if !self.waits_with_geometry() {
            self.most_waiting.store(settled.blocks.max(1), Ordering::Relaxed);
        }
    }

    /// Whether the caller's blocks wait for peers: those of `payload` do not, but for one at most, and `route` has its own.
    fn waits_with_geometry(&self) -> bool {
        self.choice.phase().geometry.is_some() && self.low_latency.is_some()
    }

    /// Whether nothing but this object's kernels waits on the device.
    pub(super) fn is_alone(&self) -> bool {
        self.is_alone.load(Ordering::Relaxed)
    }

    fn most_waiting(&self) -> u32 {
        self.most_waiting.load(Ordering::Relaxed)
    }

    pub(super) fn route_blocks(&self, tokens: Tokens, kernel: &shape::Loaded<RouteParameters>) -> u32 {
        self.choice.route_blocks(tokens).min(kernel.most_blocks).min(self.most_waiting())
    }

    /// Of a `route` that is small: one routes, the others warm rows. They are not more than the registry counts as waiting, so all find a place.
    pub(super) fn small_route_blocks(&self, kernel: &shape::Loaded<RouteParameters>) -> u32 {
        (1 + self.choice.warming_blocks()).min(self.route_blocks(Tokens::exactly(u32::MAX), kernel))
    }

    pub(super) fn low_latency_blocks(&self, tokens: Tokens, kernel: &shape::Loaded<LowLatencyParameters>) -> u32 {
        self.choice.low_latency_blocks(tokens, kernel.threads).min(kernel.most_blocks).min(self.most_waiting())
    }

    /// # Errors
    /// [`Error::Unsupported`] when a rank has too many experts.
    pub(super) fn index(&self, op: &'static str) -> Result<&shape::Loaded<IndexParameters>> {
        self.index.as_ref().ok_or_else(|| {
            let what = format!("counts of {} local experts on a GPU", self.choice.max_local);
            Error::Unsupported { op, what, why: "they do not fit in shared memory".into() }
        })
    }
}
