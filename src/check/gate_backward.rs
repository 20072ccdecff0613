//! Checks of the backward of the shared-expert gate.
#![forbid(unsafe_code)]

use crate::backend::Backend;
use crate::check::gate::{Case, DTYPES, Kind, Matrix, Output, ROUNDINGS, Sizes, sizes};
use crate::check::{Failed, Group, variants};
use crate::ops::gate::{Activation, GateGradients, GateMulGradients, GateOptions, gate_backward, gate_mul_backward};
use crate::oracle::{float, gate_backward as oracle};
use crate::random::SplitMix64;
use crate::tensor::DType;

/// Around the 256 partial sums of the sum over tokens, the rows that a backend takes at once, and usual vectors.
const TS: [usize; 12] = [0, 1, 2, 3, 7, 8, 9, 65, 255, 256, 257, 264];
/// Around the columns that a backend sums at once and the numbers that the order of the dot product is made of.
const KS: [usize; 10] = [0, 1, 7, 16, 33, 257, 511, 512, 513, 2049];
/// Several steps of every partial sum, and enough of both dimensions for several threads.
const LARGE: [(usize, usize); 3] = [(513, 513), (1030, 70), (600, 1025)];

/// Every group of this operation.
pub fn groups() -> Vec<Group> {
    let mut groups = Vec::new();
    for (x_dtype, w_dtype) in DTYPES {
        for rounding in ROUNDINGS {
            let case = Case { x_dtype, w_dtype, rounding };
            let mut push = |form: &str, sizes: fn() -> Vec<Sizes>, run: fn(Case, &Backend, Sizes) -> Result<(), Failed>| {
                let name = format!("{form} {x_dtype} {w_dtype} {}", format!("{rounding:?}").to_lowercase());
                groups.push(Group::new("gate", name, move |backend| case.all(backend, sizes(), run)));
            };
            push("gate_backward", all_sizes, backward);
            push("gate_mul_backward", product_sizes, mul_backward);
        }
        groups.push(Group::new("gate", format!("gate_backward of products that vanish {x_dtype} {w_dtype}"), move |backend| {
            vanishing(backend, x_dtype, w_dtype)
        }));
    }
    groups
}

/// Every T with every K, but not many rows of the longest, to keep the scalar level and the oracle short.
fn all_sizes() -> Vec<Sizes> {
    let small = TS.into_iter().flat_map(|t| KS.into_iter().map(move |k| (t, k))).filter(|(t, k)| t * k <= 9 * 2049 || *k <= 33);
    let edges = [255, 256, 257].into_iter().flat_map(|t| [511, 512, 513].into_iter().map(move |k| (t, k)));
    sizes(small.chain(edges).chain(LARGE).map(|(t, k)| (t, k, 0)))
}

/// Every T with a few widths, and each width with a few T.
fn product_sizes() -> Vec<Sizes> {
    let ks = [0, 9, 64, 300];
    let ns = [0, 1, 7, 8, 17, 255, 256, 257, 2049];
    let all = ns.into_iter().enumerate().flat_map(|(i, n)| [0, 1, 3, 65].into_iter().map(move |t| (t, ks[(i + t) % ks.len()], n)));
    sizes(all.chain([(300, 9, 700)]))
}

/// Which results a case asks for changes with a period of its own each, so that all choices meet.
fn backward(case: Case, backend: &Backend, sizes: Sizes) -> Result<(), Failed> {
    let Sizes { t, k, case_idx, .. } = sizes;
    let options = case.options(sizes);
    let (x, w) = case.inputs(sizes, options.strided);
    let mut random = SplitMix64::stream(8, case_idx as u64);
    let dg_dtype = [case.x_dtype, DType::F32][case_idx % 2];
    let dg_kind = if case_idx % 4 == 3 { Kind::Special } else { Kind::WideRange };
    let dg = Matrix::new(dg_dtype, t, 1, case_idx % 3 == 1, dg_kind, &mut random);
    let dw_dtype = [case.w_dtype, DType::F32][case_idx / 2 % 2];
    let dbias_dtype = [case.x_dtype, DType::F32][case_idx / 3 % 2];
    let mut dlogit = Output::new(DType::F32, t, 1, case_idx % 5 >= 3);
    let mut dx = (case_idx % 7 != 2).then(|| Output::new(case.x_dtype, t, k, case_idx % 4 >= 2));
    let mut dw = (case_idx % 9 != 4).then(|| Output::new(dw_dtype, 1, k, false));
    let mut dbias = (case_idx % 3 != 0).then(|| Output::new(dbias_dtype, 1, 1, false));
    let outputs = GateGradients {
        dlogit: dlogit.column_view(backend)?,
        dx: dx.as_mut().map(|out| out.view(backend)).transpose()?,
        dw: dw.as_mut().map(|dw| if case_idx % 2 == 1 { dw.view(backend) } else { dw.row_view(backend) }).transpose()?,
        dbias: dbias.as_mut().map(|out| out.row_view(backend)).transpose()?,
    };
    gate_backward(
        backend,
        x.view(backend)?,
        w.vector_view(backend, case_idx % 3 == 2)?,
        dg.view(backend)?,
        &case.gate_options(backend, &options)?,
        outputs,
    )?;

    let want = oracle::dlogit(&case.oracle_gates(sizes, &x, &w, &options), &dg.values);
    let mut want_bytes = Vec::new();
    want.iter().for_each(|value| float::push(DType::F32, *value, &mut want_bytes));
    dlogit.check(backend, "dlogit", &want_bytes)?;
    if let Some(mut dx) = dx {
        dx.check(backend, "dx", &oracle::dx(&want, &w.values, case.x_dtype))?;
    }
    if let Some(mut dw) = dw {
        dw.check(backend, "dw", &oracle::dw(&want, &x.values, k, dw_dtype))?;
    }
    if let Some(mut dbias) = dbias {
        dbias.check(backend, "dbias", &oracle::dbias(&want, dbias_dtype))?;
    }
    Ok(())
}

/// Every product is negative and below the smallest number, so -0, and so is every partial sum when there are enough tokens; the sum is +0.
fn vanishing(backend: &Backend, x_dtype: DType, w_dtype: DType) -> Result<usize, Failed> {
    let mut num_cases = 0;
    for (name, backend) in variants(backend)? {
        for t in [1, 255, 256, 300] {
            let k = 3;
            let mut random = SplitMix64::stream(10, t as u64);
            let x = Matrix::new(x_dtype, t, k, false, Kind::Small, &mut random);
            let w = Matrix::new(w_dtype, 1, k, false, Kind::Plain, &mut random);
            let dg = Matrix::new(DType::F32, t, 1, false, Kind::Positive, &mut random);
            // dlogit is the smallest number or twice it, negative; times an x below one eighth that is at most a quarter of the smallest number.
            let options = GateOptions { activation: Activation::Linear, scale: -f32::from_bits(1), ..GateOptions::default() };
            let mut dlogit = Output::new(DType::F32, t, 1, false);
            let mut dw = Output::new(w_dtype, 1, k, false);
            let outputs = GateGradients { dlogit: dlogit.column_view(&backend)?, dx: None, dw: Some(dw.row_view(&backend)?), dbias: None };
            gate_backward(&backend, x.view(&backend)?, w.vector_view(&backend, false)?, dg.view(&backend)?, &options, outputs)?;
            dw.check(&backend, "dw", &vec![0; k * w_dtype.size()]).map_err(|failed| Failed(format!("{name}, T {t}: {}", failed.0)))?;
            num_cases += 1;
        }
    }
    Ok(num_cases)
}

fn mul_backward(case: Case, backend: &Backend, sizes: Sizes) -> Result<(), Failed> {
    let Sizes { t, n, case_idx, .. } = sizes;
    let options = case.options(sizes);
    let (x, w) = case.inputs(sizes, options.strided);
    let mut random = SplitMix64::stream(9, case_idx as u64);
    let s_dtype = [case.x_dtype, DType::F32][case_idx / 2 % 2];
    let s = Matrix::new(s_dtype, t, n, !options.strided, Kind::WideRange, &mut random);
    let dout = Matrix::new(s_dtype, t, n, case_idx % 3 == 1, Kind::Special, &mut random);
    let mut dg = Output::new(DType::F32, t, 1, case_idx % 5 >= 3);
    let mut ds = (case_idx % 3 != 0).then(|| Output::new(s_dtype, t, n, case_idx % 4 >= 2));
    let outputs = GateMulGradients { dg: dg.column_view(backend)?, ds: ds.as_mut().map(|out| out.view(backend)).transpose()? };
    let gate_options = case.gate_options(backend, &options)?;
    gate_mul_backward(
        backend,
        x.view(backend)?,
        w.vector_view(backend, false)?,
        s.view(backend)?,
        dout.view(backend)?,
        &gate_options,
        outputs,
    )?;

    let mut want = Vec::new();
    oracle::dg(&dout.values, &s.values, t, n).into_iter().for_each(|value| float::push(DType::F32, value, &mut want));
    dg.check(backend, "dg", &want)?;
    if let Some(mut ds) = ds {
        ds.check(backend, "ds", &oracle::ds(&case.oracle_gates(sizes, &x, &w, &options), &dout.values, s_dtype))?;
    }
    Ok(())
}
