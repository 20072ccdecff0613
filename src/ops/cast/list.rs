//! A list of matrices that is checked once and cast often.
#![forbid(unsafe_code)]

use super::check::{self, Known};
use super::table::Table;
use super::{OP, Operands, Options, cpu};
use crate::backend::Backend;
use crate::error::{Error, Result};

/// A list of matrices that is checked once and cast often: the experts' weights of a trainer, say, whose tensors lie at the same places in each step.
///
/// It does what [`cast`](super::cast) does with the same matrices and options. On a GPU any number of matrices is one launch, a call costs the host
/// a launch and nothing for each matrix, and since the parts of all matrices stand in a table the kernel starts sooner. Beyond what `cast` checks, no
/// output may overlap another or an input, of whichever matrix.
///
/// The list keeps its tensors. What they hold may change between casts, as far as the borrow checker sees it: device memory may, by work in the same stream.
/// A graph that has captured a cast needs the list as long as it is launched.
///
/// ```
/// use moe_kernels::ops::cast::{List, Operands, Options};
/// use moe_kernels::{Backend, DType, TensorView, TensorViewMut};
///
/// let backend = Backend::cpu();
/// let weights = [[1.0f32, -2.0, 0.5, 3.3], [0.0, 4.0, 8.0, -1.0]]; // of two experts
/// let (mut rows, mut columns) = ([[0u8; 4]; 2], [[0u8; 4]; 2]);
/// let matrices = weights.iter().zip(rows.iter_mut().zip(&mut columns)).map(|(x, (row, column))| {
///     Ok(Operands::new(TensorView::from_slice(x, &[2, 2])?)
///         .row(TensorViewMut::from_bytes(row, DType::E4M3, &[2, 2])?)
///         .column(TensorViewMut::from_bytes(column, DType::E4M3, &[2, 2])?))
/// });
/// let mut list = List::new(&backend, matrices.collect::<moe_kernels::Result<_>>()?, Options::default())?;
/// for _step in 0..3 {
///     list.cast(&backend)?;
/// }
/// drop(list);
/// assert_eq!((rows[0], columns[0]), ([0x38, 0xC0, 0x30, 0x45], [0x38, 0x30, 0xC0, 0x45])); // 1, -2, 0.5, 3.25 and transposed
/// assert_eq!(rows[1], [0x00, 0x48, 0x50, 0xB8]);
/// # Ok::<(), moe_kernels::Error>(())
/// ```
#[derive(Debug)]
pub struct List<'a> {
    matrices: Vec<Operands<'a>>,
    options: Options<'a>,
    prepared: Prepared,
}

#[derive(Debug)]
enum Prepared {
    /// No matrices.
    Nothing,
    Cpu(Known),
    Cuda(Box<Table>),
}

impl<'a> List<'a> {
    /// Checks the matrices and prepares them for `backend`. On a GPU this compiles what is not compiled yet, allocates a table in its memory (about 120
    /// bytes for each part of some hundred rows and columns), and waits until that is uploaded.
    ///
    /// # Errors
    /// [`Error::Invalid`] naming `matrices[i].field`; [`Error::Unsupported`] while the backend's stream is captured; [`Error::Memory`]; those of the
    /// compiler and the driver.
    pub fn new(backend: &Backend, matrices: Vec<Operands<'a>>, options: Options<'a>) -> Result<Self> {
        let prepared = match backend {
            Backend::Cpu(cpu) => match check::list(cpu, &matrices, &options, |_| ())? {
                Some(known) => Prepared::Cpu(known),
                None => Prepared::Nothing,
            },
            Backend::Cuda(cuda) => match check::list(cuda, &matrices, &options, |_| ())? {
                Some(known) => {
                    check::all_apart(&matrices, &options)?;
                    Prepared::Cuda(Box::new(Table::new(cuda, &known, &matrices, &options)?))
                }
                None => Prepared::Nothing,
            },
        };
        Ok(List { matrices, options, prepared })
    }

    /// Casts every matrix. `backend` is of the kind and on the device for which the list was made; its stream may be another one.
    ///
    /// # Errors
    /// [`Error::Invalid`] for another backend or device, [`Error::Gpu`] from the driver.
    pub fn cast(&mut self, backend: &Backend) -> Result<()> {
        match (&self.prepared, backend) {
            (Prepared::Nothing, _) => Ok(()),
            (Prepared::Cpu(known), Backend::Cpu(cpu)) => {
                if check::is_noop(cpu, &self.options) {
                    return Ok(());
                }
                cpu::list(cpu, known, &mut self.matrices)
            }
            (Prepared::Cuda(table), Backend::Cuda(cuda)) => table.cast(cuda),
            (prepared, backend) => {
                let want = if matches!(prepared, Prepared::Cpu(_)) { "cpu, as of the list" } else { "cuda, as of the list" };
                Err(Error::invalid(OP, "backend", backend.name(), want))
            }
        }
    }

    /// The matrices, with what they hold after the casts that have run.
    pub fn matrices(&self) -> &[Operands<'a>] {
        &self.matrices
    }

    /// The matrices, without the list. On a GPU this waits for its work.
    pub fn into_matrices(self) -> Vec<Operands<'a>> {
        self.matrices
    }
}
