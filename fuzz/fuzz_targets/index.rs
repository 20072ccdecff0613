//! The index of a checkpoint on arbitrary bytes: it never panics, and names only files inside the folder.
#![no_main]

use std::path::{Component, Path};

use libfuzzer_sys::fuzz_target;
use moe_kernels::layer::checkpoint::Index;

fuzz_target!(|data: &[u8]| {
    let Ok(index) = Index::parse(data, "fuzz".as_ref()) else { return };
    for name in index.names() {
        let file = index.file_of(name).expect("a name that is listed has a file");
        assert!(file.ends_with(".safetensors"));
        assert!(Path::new(file).components().all(|part| matches!(part, Component::Normal(_))));
    }
});
