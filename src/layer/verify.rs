//! Is a block's result right? Sampled tokens are computed again, alone, and by the oracle.
#![forbid(unsafe_code)]

use crate::backend::{Backend, Cpu};
use crate::ep::Wire;
use crate::error::{Error, Result};
use crate::id::Expert;
use crate::layer::block::SharedExpert;
use crate::layer::experts::{Rows, Scratch, Selection};
use crate::layer::weights::Mlp;
use crate::layer::{BlockConfig, CommonWeights, ExpertWeights};
use crate::ops::gate::Rounding;
use crate::oracle::layer::{self as oracle, Sums};
use crate::oracle::{self as specification, compare, float};
use crate::routing::Routes;
use crate::tensor::{DType, TensorView};

const OP: &str = "verify";

/// Checks results of a block against a second computation.
///
/// The experts' rows of a token are computed by the same code as in the block, but alone, and summed by the oracle: the result must be equal bit for
/// bit. And the whole token is computed by the oracle with f64 sums: the result must be near.
#[derive(Debug)]
pub struct Verifier<'a> {
    cpu: Cpu,
    config: &'a BlockConfig,
    /// Rank of each expert.
    owners: Vec<usize>,
    common: &'a CommonWeights,
    experts: Vec<&'a ExpertWeights>,
}

/// What [`Verifier::token`] found.
#[derive(Debug, Clone, PartialEq, serde::Serialize)]
pub struct TokenCheck {
    /// The result equals bit for bit that of the token computed alone and combined by the oracle.
    pub is_equal: bool,
    /// The first difference, if there is one.
    pub difference: Option<String>,
    /// |got - f64 oracle| / |f64 oracle| (2-norms; the norm itself where the oracle says 0).
    pub error: f64,
    /// What `error` may be at most, derived from the roundings.
    pub bound: f64,
}

impl TokenCheck {
    /// Equal, and near enough to the oracle.
    pub fn is_right(&self) -> bool {
        self.is_equal && self.error <= self.bound
    }
}

impl<'a> Verifier<'a> {
    /// `experts`: the weights of every rank, in the order of ranks.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a configuration that this number of ranks cannot use.
    pub fn new(
        backend: &'a Backend,
        config: &'a BlockConfig,
        common: &'a CommonWeights,
        experts: impl IntoIterator<Item = &'a ExpertWeights>,
    ) -> Result<Self> {
        let cpu = backend.as_cpu("verify")?;
        let experts: Vec<_> = experts.into_iter().collect();
        config.check(experts.len())?;
        let owners = specification::dispatch::owners(&config.ep(), experts.len());
        Ok(Verifier { cpu: cpu.clone(), config, owners, common, experts })
    }

    /// Checks one token: its row of x, its routes, and the block's result.
    ///
    /// # Errors
    /// [`Error::Invalid`] for rows of another size, or weights without an expert that a route names.
    pub fn token(&self, x: &[u8], topk_idx: &[i32], topk_weights: &[f32], got: &[u8]) -> Result<TokenCheck> {
        let (hidden, dtype, rounding) = (self.config.shape.hidden, self.config.dtype, self.config.rounding);
        let row_bytes = hidden * dtype.size();
        for (what, bytes) in [("x", x), ("got", got)] {
            if bytes.len() != row_bytes {
                return Err(Error::invalid(OP, what, format!("{} bytes", bytes.len()), format!("{row_bytes}")));
            }
        }
        let routes = oracle::routes(self.config.shape.router.num_experts, topk_idx, topk_weights);

        let mut scratch = Scratch::default();
        let rows = Rows { bytes: x, dtype, stride_bytes: row_bytes };
        let mut alone = Vec::new();
        for &(expert, weight) in &routes {
            let mut row = vec![0; row_bytes];
            scratch.load(&self.cpu, rows, Selection::From(0), 0..1, hidden);
            scratch.mlp(&self.cpu, self.expert(expert)?, dtype, rounding);
            scratch.store(&self.cpu, hidden, dtype, None, &mut row);
            alone.push((expert, weight, row));
        }
        let mut shared = SharedExpert::new(&self.cpu, self.common);
        let view = TensorView::from_bytes(x, dtype, &[1, hidden])?;
        let shared = shared.rows(&self.cpu, self.common, dtype, rounding, &mut scratch, &view, rows, 1)?;
        let shared = shared.map(|s| s.host(OP, "shared").map(|bytes| float::values(s.dtype(), bytes))).transpose()?;
        let want = oracle::result(self.config, &self.owners, &alone, shared.as_deref());
        let difference = compare::equal("token", dtype, &[hidden], got, &want).err().map(|d| d.to_string());

        let near = self.oracle(Sums::F64, x, &routes)?;
        let [got, near] = [got, &near].map(|bytes| float::values(dtype, bytes));
        let norm = |values: &mut dyn Iterator<Item = f64>| values.map(|v| v * v).sum::<f64>().sqrt();
        let distance = norm(&mut got.iter().zip(&near).map(|(&a, &b)| a as f64 - b as f64));
        let size = norm(&mut near.iter().map(|&v| v as f64));
        let error = if size > 0.0 { distance / size } else { distance };
        Ok(TokenCheck { is_equal: difference.is_none(), difference, error, bound: self.bound() })
    }

    /// The token's result by the oracle alone.
    ///
    /// # Errors
    /// [`Error::Invalid`] for weights without an expert that a route names.
    pub fn oracle(&self, sums: Sums, x: &[u8], routes: &[(usize, f32)]) -> Result<Vec<u8>> {
        let (dtype, rounding) = (self.config.dtype, self.config.rounding);
        let x = float::values(dtype, x);
        let mut rows = Vec::new();
        for &(expert, weight) in routes {
            rows.push((expert, weight, oracle::expert(sums, rounding, self.expert(expert)?, dtype, &x)));
        }
        let common = self.common;
        let gate = common.shared_gate.as_ref();
        let shared = common.shared.as_ref().map(|mlp| oracle::shared(sums, rounding, mlp, gate, dtype, &x));
        Ok(oracle::result(self.config, &self.owners, &rows, shared.as_deref()))
    }

    /// What the 2-norm of the error may be, relative to that of the result.
    ///
    /// Both sides round at the same places (`Fused`: h, row, what travels, result; `Framework`: also gate, up, SiLU(gate), weight * row and the routed
    /// sum), each by at most half a unit, `2^-p` of a format with p bits; sums that differ may round to neighbours, one unit apart: `2 * 2^-p` for each
    /// place. f32 sums of n terms differ from f64 sums by less than
    /// `n * 2^-24` of the terms' norm. An fp8 wire adds its own unit, `2 * 2^-4`.
    fn bound(&self) -> f64 {
        let bits = match self.config.dtype {
            DType::BF16 => 8,
            DType::F16 => 11,
            _ => 24,
        };
        let shape = &self.config.shape;
        let terms = shape.hidden + shape.expert_width.max(shape.shared_width) + shape.router.k;
        let wire = if self.config.wire == Wire::AsIs { 0.0 } else { 2.0 * 2f64.powi(-4) };
        let places = match self.config.rounding {
            Rounding::Fused => 4.0,
            Rounding::Framework => 9.0,
        };
        2.0 * places * 2f64.powi(-bits) + terms as f64 * 2f64.powi(-24) + wire
    }

    fn expert(&self, expert: usize) -> Result<&'a Mlp> {
        let found = self.owners.get(expert).and_then(|&rank| self.experts.get(rank)).and_then(|w| w.get(Expert(expert as u32)));
        found.ok_or_else(|| Error::invalid(OP, "experts", format!("no weights of expert {expert}"), "those of every expert, by rank"))
    }

    /// Rows that each global expert must have computed, for the routes of all ranks.
    pub fn num_rows_per_expert<'r>(&self, routes: impl IntoIterator<Item = &'r Routes>) -> Vec<u32> {
        let num_experts = self.config.shape.router.num_experts;
        let mut counts = vec![0; num_experts];
        for routes in routes {
            for token in 0..routes.num_tokens {
                for (expert, _) in oracle::routes(num_experts, routes.idx_of(token), routes.weights_of(token)) {
                    counts[expert] += 1;
                }
            }
        }
        counts
    }
}
