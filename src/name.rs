//! Names of operations and phases: static texts that travel between processes.
#![forbid(unsafe_code)]

use std::collections::BTreeSet;
use std::sync::{Mutex, PoisonError};

use serde::{Deserialize, Deserializer};

/// A static text.
pub(crate) type Name = &'static str;

/// The one static text equal to `text`. Texts are kept for the life of the process: there are as many as operations and phases.
pub(crate) fn intern(text: &str) -> Name {
    static NAMES: Mutex<BTreeSet<Name>> = Mutex::new(BTreeSet::new());
    let mut names = NAMES.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(name) = names.get(text) {
        return name;
    }
    let name: Name = Box::leak(text.into());
    names.insert(name);
    name
}

/// A [`Name`] as another process wrote it.
pub(crate) fn interned<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Name, D::Error> {
    String::deserialize(deserializer).map(|text| intern(&text))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_texts_are_one() {
        assert_eq!(intern("some operation").as_ptr(), intern(&String::from("some operation")).as_ptr());
        assert_ne!(intern("some operation"), intern("another"));
    }
}
