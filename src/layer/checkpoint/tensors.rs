//! One safetensors file, mapped.
#![forbid(unsafe_code)]

use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use memmap2::Mmap;
use safetensors::Dtype;
use safetensors::tensor::{Metadata, SafeTensorError, TensorInfo};

use super::files;
use super::json::{self, Unique, quoted, wrong};
use crate::cpu::{Level, convert};
use crate::error::{Error, Result};
use crate::layer::bytes::Bytes;
use crate::tensor::DType;

const OP: &str = "tensor";

/// Bytes of the length in front of the header (spec: safetensors).
const LENGTH_BYTES: usize = 8;
/// Longest header (spec: safetensors).
const MAX_HEADER_BYTES: u64 = 100_000_000;

/// A safetensors file. It is mapped: only what is used is read.
///
/// ```
/// use moe_kernels::DType;
/// use moe_kernels::layer::TensorFile;
/// let file = TensorFile::open("tests/vectors/checkpoints/qwen2_moe/golden_layer1.safetensors".as_ref())?;
/// let ids = file.tensor("bf16.gate.2")?;
/// assert_eq!((ids.shape(), ids.dtype()), (&[48, 4][..], DType::I64));
/// # Ok::<(), moe_kernels::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct TensorFile {
    path: PathBuf,
    map: Arc<Mmap>,
    header: Arc<Header>,
}

impl TensorFile {
    /// Opens a file and checks its header. The file must not be changed while it, or weights that come from it, are in use.
    ///
    /// # Errors
    /// [`Error::Io`] when it cannot be opened, [`Error::Format`] when it is no whole safetensors file.
    pub fn open(path: &Path) -> Result<Self> {
        let map = files::map(path)?;
        let header = Arc::new(Header::parse(&map, path)?);
        Ok(TensorFile { path: path.to_path_buf(), map, header })
    }

    /// Where the file is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Names of all tensors, in the order of their bytes.
    pub fn names(&self) -> &[String] {
        &self.header.names
    }

    /// A tensor of that name is here.
    pub fn contains(&self, name: &str) -> bool {
        self.header.metadata.info(name).is_some()
    }

    /// A tensor whose name begins so is here.
    pub(super) fn has_prefix(&self, prefix: &str) -> bool {
        self.header.names.iter().any(|name| name.starts_with(prefix))
    }

    /// One tensor.
    ///
    /// # Errors
    /// [`Error::Format`] when it is missing, or of a type that this crate has no name for.
    pub fn tensor(&self, name: &str) -> Result<Tensor> {
        let Some(info) = self.header.metadata.info(name) else {
            return Err(wrong(&self.path, format!("tensor `{}` is missing", quoted(name))));
        };
        let dtype = match info.dtype {
            Dtype::F32 => DType::F32,
            Dtype::F16 => DType::F16,
            Dtype::BF16 => DType::BF16,
            Dtype::F8_E4M3 => DType::E4M3,
            Dtype::F8_E5M2 => DType::E5M2,
            Dtype::F8_E4M3FNUZ => DType::E4M3Fnuz,
            Dtype::F8_E5M2FNUZ => DType::E5M2Fnuz,
            Dtype::F8_E8M0 => DType::E8M0,
            Dtype::U8 | Dtype::BOOL => DType::Bytes,
            Dtype::I32 => DType::I32,
            Dtype::I64 => DType::I64,
            Dtype::U32 => DType::U32,
            other => return Err(wrong(&self.path, format!("tensor `{}` is of type {other}, which is not supported", quoted(name)))),
        };
        let range = self.header.range(info);
        Ok(Tensor {
            name: name.to_string(),
            path: self.path.clone(),
            dtype,
            shape: info.shape.clone(),
            bytes: Bytes::Mapped { map: self.map.clone(), range },
        })
    }
}

/// The checked header of a file.
#[derive(Debug, Clone)]
pub struct Header {
    metadata: Metadata,
    /// In the order of their bytes.
    names: Vec<String>,
    /// Where the bytes of tensors begin in the file.
    data_start: usize,
}

impl Header {
    /// Parses the header of a whole `file`; `path` is for messages.
    ///
    /// # Errors
    /// [`Error::Format`]: cut short, a key twice, a tensor that is not what its shape and type need, overlaps another, or ends outside the file.
    pub fn parse(file: &[u8], path: &Path) -> Result<Self> {
        let size = file.len();
        let Some((length, rest)) = file.split_first_chunk::<LENGTH_BYTES>() else {
            return Err(wrong(
                path,
                format!("has {size} bytes; a safetensors file begins with {LENGTH_BYTES} that say how long its header is"),
            ));
        };
        let length = u64::from_le_bytes(*length);
        if length > MAX_HEADER_BYTES {
            return Err(wrong(path, format!("header of {length} bytes, at most {MAX_HEADER_BYTES} are allowed")));
        }
        let Some(header) = rest.get(..length as usize) else {
            return Err(wrong(path, format!("header of {length} bytes in a file of {size}")));
        };
        let Unique(tensors) = json::parse::<Unique<TensorInfo>>(header, path)?;
        let data_start = LENGTH_BYTES + header.len();
        let data_bytes = size - data_start;
        for (name, info) in &tensors {
            check(name, info, data_bytes).map_err(|why| wrong(path, why))?;
        }
        let mut tensors: Vec<_> = tensors.into_iter().collect();
        tensors.sort_by(|a, b| (a.1.data_offsets, &a.0).cmp(&(b.1.data_offsets, &b.0)));
        let metadata = Metadata::new(None, tensors).map_err(|error| match error {
            SafeTensorError::InvalidOffset(name) => {
                wrong(path, format!("tensor `{}` does not begin where the one before it ends", quoted(&name)))
            }
            error => wrong(path, quoted(&error.to_string())),
        })?;
        if metadata.data_len() != data_bytes {
            return Err(wrong(path, format!("tensors end at byte {}, the file has {data_bytes} behind its header", metadata.data_len())));
        }
        Ok(Header { names: metadata.offset_keys(), metadata, data_start })
    }

    /// Bytes of the file that each tensor has, in order.
    pub fn ranges(&self) -> Vec<(String, Range<usize>)> {
        let range = |name: &String| Some((name.clone(), self.range(self.metadata.info(name)?)));
        self.names.iter().filter_map(range).collect()
    }

    fn range(&self, info: &TensorInfo) -> Range<usize> {
        self.data_start + info.data_offsets.0..self.data_start + info.data_offsets.1
    }
}

/// Fails, in words, when a tensor's bytes are not those of its shape and type, or not in the file.
fn check(name: &str, info: &TensorInfo, data_bytes: usize) -> Result<(), String> {
    let (start, end) = info.data_offsets;
    let what = || format!("tensor `{}`, {} of {}", quoted(name), shown(&info.shape), info.dtype);
    if start > end || end > data_bytes {
        return Err(format!("{}, has bytes {start} to {end}; the file has {data_bytes} behind its header", what()));
    }
    let elements = info.shape.iter().try_fold(1usize, |product, &n| product.checked_mul(n));
    let bits = elements.and_then(|n| n.checked_mul(info.dtype.bitsize()));
    match bits {
        Some(bits) if bits % 8 == 0 && bits / 8 == end - start => Ok(()),
        Some(bits) => Err(format!("{}, has {} bytes, expected {}", what(), end - start, bits / 8)),
        None => Err(format!("{}, has more bytes than can be counted", what())),
    }
}

/// A shape for a message.
pub(super) fn shown(shape: &[usize]) -> String {
    quoted(&format!("{shape:?}"))
}

/// One tensor of a file; its bytes stay in the file.
#[derive(Debug, Clone, PartialEq)]
pub struct Tensor {
    name: String,
    path: PathBuf,
    dtype: DType,
    shape: Vec<usize>,
    bytes: Bytes,
}

impl Tensor {
    /// Its name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Type of the elements.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// The file's shape.
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// The elements, row-major, little endian, at any address.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// All elements as f32, without rounding (f32, f16, bf16, any FP8, E8M0).
    ///
    /// # Errors
    /// [`Error::Invalid`] for other types.
    pub fn to_f32(&self) -> Result<Vec<f32>> {
        if !self.dtype.is_float() && !self.dtype.is_fp8() && self.dtype != DType::E8M0 {
            return Err(Error::invalid(OP, format!("`{}` dtype", quoted(&self.name)), self.dtype, "f32, f16, bf16, an FP8 type or e8m0"));
        }
        Ok(widened(self.dtype, &self.bytes))
    }

    /// All elements as i64 (i32, i64, u32).
    ///
    /// # Errors
    /// [`Error::Invalid`] for other types.
    pub fn to_i64(&self) -> Result<Vec<i64>> {
        let four = |value: fn([u8; 4]) -> i64| self.bytes.as_chunks().0.iter().map(|&b| value(b)).collect();
        match self.dtype {
            DType::I64 => Ok(self.bytes.as_chunks().0.iter().map(|&b| i64::from_le_bytes(b)).collect()),
            DType::I32 => Ok(four(|b| i32::from_le_bytes(b) as i64)),
            DType::U32 => Ok(four(|b| u32::from_le_bytes(b) as i64)),
            other => Err(Error::invalid(OP, format!("`{}` dtype", quoted(&self.name)), other, "i32, i64 or u32")),
        }
    }

    /// Fails unless it has this shape.
    pub(super) fn expect_shape(&self, want: &[usize]) -> Result<()> {
        match self.shape == want {
            true => Ok(()),
            false => Err(self.wrong(format!("has shape {}, expected {want:?}", shown(&self.shape)))),
        }
    }

    /// Fails unless it has one of these types.
    pub(super) fn expect_dtype(&self, want: &[DType]) -> Result<()> {
        match want.contains(&self.dtype) {
            true => Ok(()),
            false => {
                let want: Vec<_> = want.iter().map(|dtype| dtype.name()).collect();
                Err(self.wrong(format!("is of type {}, expected {}", self.dtype, want.join(", "))))
            }
        }
    }

    /// An error of this tensor.
    pub(super) fn wrong(&self, why: String) -> Error {
        wrong(&self.path, format!("tensor `{}` {why}", quoted(&self.name)))
    }

    /// The bytes, without a copy.
    pub(super) fn shared_bytes(&self) -> &Bytes {
        &self.bytes
    }
}

/// Elements of `dtype` as f32.
pub(super) fn widened(dtype: DType, bytes: &[u8]) -> Vec<f32> {
    let mut values = vec![0f32; bytes.len() / dtype.size()];
    convert::widen(Level::detect(), dtype, bytes, &mut values);
    values
}
