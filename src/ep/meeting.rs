//! Collective calls of setup: every rank brings a value, and all get all of them or the same error.
#![forbid(unsafe_code)]

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex};

use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

use super::symmetric::Symmetric;
use super::world::lock;
use crate::error::{Error, Result};
use crate::gpu::Shareable;
use crate::id::Rank;
use crate::name::Name;

/// What a rank brings to a collective call.
#[derive(Debug, Clone)]
pub(crate) struct Posted {
    /// The call, to find ranks that make another one.
    pub op: Name,
    /// Its value, or why it has none.
    pub value: Result<Value>,
    /// Open files that the others get: this is how memory is exchanged between processes.
    pub files: Vec<Arc<OwnedFd>>,
    /// Memory, between threads of a process.
    pub memory: Option<Arc<Symmetric>>,
    /// Memory of a GPU, between threads of a process.
    pub device_memory: Option<Arc<Shareable>>,
}

impl Posted {
    pub fn new(op: Name, value: Result<impl Serialize>) -> Self {
        let differs = |error| Error::invalid(op, "value", error, "one that can be written down");
        let value = value.and_then(|value| serde_json::to_value(value).map_err(differs));
        Posted { op, value, files: Vec::new(), memory: None, device_memory: None }
    }
}

/// Every rank's value, or the error of the lowest rank that brought one: the same on all ranks.
pub(super) fn values<T: DeserializeOwned>(op: Name, posted: &[Posted]) -> Result<Vec<T>> {
    let errors: Vec<_> = posted.iter().enumerate().filter_map(|(r, p)| p.value.as_ref().err().map(|e| (r, e))).collect();
    if let Some(&(rank, error)) = errors.first() {
        if errors.len() == posted.len() && errors.iter().all(|(_, e)| *e == error) {
            return Err(error.clone());
        }
        return Err(Error::Setup { op, rank: Rank(rank as u32), error: Box::new(error.clone()) });
    }
    let differs = || Error::invalid(op, "collective call", "another operation on some rank", "the same on all ranks, in the same order");
    let value = |p: &Posted| {
        let value = p.value.clone().ok().filter(|_| p.op == posted[0].op)?;
        serde_json::from_value(value).ok()
    };
    posted.iter().map(|p| value(p).ok_or_else(differs)).collect()
}

/// Where threads of a process leave what they bring.
#[derive(Debug, Default)]
pub(super) struct Board(Mutex<HashMap<u64, Call>>);

/// One collective call: what each rank brought, and how many have taken it.
#[derive(Debug)]
struct Call {
    posted: Vec<Option<Posted>>,
    num_taken: usize,
}

impl Board {
    /// `rank` of `world` brings something to call `key`. It announces so afterwards.
    pub fn post(&self, key: u64, world: usize, rank: usize, posted: Posted) {
        let mut calls = lock(&self.0);
        let call = calls.entry(key).or_insert_with(|| Call { posted: vec![None; world], num_taken: 0 });
        call.posted[rank] = Some(posted);
    }

    /// What all ranks brought, once all have announced it.
    pub fn take(&self, key: u64) -> Vec<Posted> {
        let mut calls = lock(&self.0);
        let Some(call) = calls.get_mut(&key) else { return Vec::new() };
        let posted: Vec<Posted> = call.posted.iter().flatten().cloned().collect();
        call.num_taken += 1;
        if call.num_taken == call.posted.len() {
            calls.remove(&key);
        }
        posted
    }
}
