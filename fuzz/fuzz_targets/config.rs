//! config.json on arbitrary bytes: it never panics, and what it accepts is the shape of a layer.
#![no_main]

use libfuzzer_sys::fuzz_target;
use moe_kernels::layer::Model;

fuzz_target!(|data: &[u8]| {
    let Ok(model) = Model::parse(data, "fuzz".as_ref()) else { return };
    model.shape.check().expect("a shape that is accepted is checked");
    assert!(model.moe_layers().count() <= model.num_layers);
    assert!(!model.is_moe(model.num_layers));
});
