//! Handles: what the library owns and C only points to.
#![forbid(unsafe_code)]

use crate::error::{Error, Result};

pub(super) const OP: &str = "C interface";

/// A value with the mark of its kind.
#[derive(Debug)]
pub struct Tagged<T> {
    tag: u64,
    value: T,
}

/// A kind of handle.
pub(super) trait Handle: Sized {
    type Value;
    const NAME: &'static str;
    /// Unlike that of every other kind, and unlike what memory holds by chance.
    const TAG: u64;

    fn wrap(tagged: Tagged<Self::Value>) -> Self;
    fn tagged(&self) -> &Tagged<Self::Value>;
    fn tagged_mut(&mut self) -> &mut Tagged<Self::Value>;
    fn unwrap(self) -> Tagged<Self::Value>;
}

/// Makes a tuple struct around [`Tagged`] a kind of handle.
macro_rules! handle {
    ($name:ident, $value:ty, $number:literal) => {
        impl Handle for $name {
            type Value = $value;
            const NAME: &'static str = stringify!($name);
            const TAG: u64 = 0x6D6F_655F_6361_7069 ^ $number;

            fn wrap(tagged: Tagged<$value>) -> Self {
                $name(tagged)
            }

            fn tagged(&self) -> &Tagged<$value> {
                &self.0
            }

            fn tagged_mut(&mut self) -> &mut Tagged<$value> {
                &mut self.0
            }

            fn unwrap(self) -> Tagged<$value> {
                self.0
            }
        }
    };
}
pub(super) use handle;

/// An argument that may not be null.
pub(super) fn required<T>(what: &str, value: Option<T>) -> Result<T> {
    value.ok_or_else(|| Error::invalid(OP, what, "null", "a pointer"))
}

fn check<H: Handle>(tag: u64) -> Result<()> {
    match tag == H::TAG {
        true => Ok(()),
        false => Err(Error::invalid(OP, "handle", "something else, or destroyed", format!("a {}", H::NAME))),
    }
}

/// The value of a handle.
pub(super) fn get<H: Handle>(handle: Option<&H>) -> Result<&H::Value> {
    let tagged = required(H::NAME, handle)?.tagged();
    check::<H>(tagged.tag)?;
    Ok(&tagged.value)
}

/// The value of a handle, to be changed.
pub(super) fn get_mut<H: Handle>(handle: Option<&mut H>) -> Result<&mut H::Value> {
    let tagged = required(H::NAME, handle)?.tagged_mut();
    check::<H>(tagged.tag)?;
    Ok(&mut tagged.value)
}

/// A new handle for C.
pub(super) fn wrapped<H: Handle>(value: H::Value) -> *mut H {
    Box::into_raw(Box::new(H::wrap(Tagged { tag: H::TAG, value })))
}

/// Stores a new handle in `*to`.
pub(super) fn give<H: Handle>(to: Option<&mut *mut H>, what: &str, value: H::Value) -> Result<()> {
    *required(what, to)? = wrapped(value);
    Ok(())
}

/// Takes the value out of a handle, which is gone.
pub(super) fn take<H: Handle>(handle: Box<H>) -> Result<H::Value> {
    if let Err(error) = check::<H>(handle.tagged().tag) {
        // Not ours to free.
        std::mem::forget(handle);
        return Err(error);
    }
    let mut tagged = handle;
    tagged.tagged_mut().tag = 0;
    Ok(tagged.unwrap().value)
}

/// Destroys a handle; null is nothing.
pub(super) fn drop_handle<H: Handle>(handle: Option<Box<H>>) -> Result<()> {
    handle.map_or(Ok(()), |handle| take(handle).map(drop))
}
