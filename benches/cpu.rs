//! CPU benchmarks. `cargo bench` runs criterion's cases and, after them, each operation in interleaved pairs with a memcpy of the same bytes
//! (buffers of 1 GiB and more, two threads); `cargo bench -- --test` runs everything once, small.

use criterion::Criterion;

mod cast;
mod ep;
mod gate;

/// Whether this is a quick run that only shows that everything works.
pub fn is_small() -> bool {
    std::env::args().any(|a| a == "--test")
}

fn main() {
    let mut criterion = Criterion::default().configure_from_args();
    gate::criterion(&mut criterion);
    cast::criterion(&mut criterion);
    ep::criterion(&mut criterion);
    criterion.final_summary();
    println!("\npairs with memcpy of the same bytes (ratio = memcpy time / operation time, median, min to max):");
    gate::pairs(is_small());
    cast::pairs(is_small());
    ep::pairs(is_small());
}
