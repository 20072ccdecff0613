//! Tests of routing beyond the shared checks.

use libtest_mimic::Trial;

mod corpus;
mod loads;
mod placement;
mod recorded;
mod synthetic;
mod trace;

/// Every trial of this module.
pub fn trials() -> Vec<Trial> {
    [corpus::trials, loads::trials, placement::trials, recorded::trials, synthetic::trials, trace::trials]
        .iter()
        .flat_map(|trials| trials())
        .collect()
}

/// Fails with what was got and what was wanted.
fn same<T: PartialEq + std::fmt::Debug>(what: &str, got: T, want: T) -> Result<(), libtest_mimic::Failed> {
    if got == want { Ok(()) } else { Err(format!("{what}: got {got:?}, expected {want:?}").into()) }
}

/// Fails unless the call was refused with this message.
fn refused<T: std::fmt::Debug>(what: &str, result: Result<T, moe_kernels::Error>, message: &str) -> Result<(), libtest_mimic::Failed> {
    match result {
        Ok(value) => Err(format!("{what}: accepted as {value:?}, expected the error `{message}`").into()),
        Err(error) => same(what, error.to_string(), message.to_string()),
    }
}

/// Runs a property over fixed cases, without a file of failures.
fn property<S: proptest::strategy::Strategy>(
    cases: &S,
    holds: impl Fn(S::Value) -> Result<(), proptest::test_runner::TestCaseError>,
) -> Result<(), libtest_mimic::Failed> {
    use proptest::test_runner::{Config, RngAlgorithm, TestRng, TestRunner};
    let config = Config { failure_persistence: None, ..Config::default() };
    Ok(TestRunner::new_with_rng(config, TestRng::deterministic_rng(RngAlgorithm::ChaCha)).run(cases, holds)?)
}
