//! The memory of one rank that every rank of its world writes and reads.
//!
//! References into it are made per access, for exactly the bytes of that access; that no two of them conflict is what the protocol
//! (`PROTOCOL.md`) guarantees, and each caller names the step that does.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::ptr::NonNull;

use crate::error::{Error, Result};

/// Zeroed bytes shared by the ranks of a world.
#[derive(Debug)]
pub(crate) struct Symmetric {
    start: NonNull<u8>,
    layout: Layout,
}

// SAFETY: the bytes are owned by this value and accessed only through `bytes` and `bytes_mut`, whose callers exclude conflicts.
unsafe impl Send for Symmetric {}
// SAFETY: as above.
unsafe impl Sync for Symmetric {}

/// Alignment of the memory (derived: a page of the machine's small pages; a huge page for what fills one).
const PAGE: usize = 4096;
const HUGE_PAGE: usize = 2 << 20;

impl Symmetric {
    /// `num_bytes` zeros, aligned to a page.
    pub fn new(num_bytes: usize) -> Result<Self> {
        let too_much = || Error::Memory {
            what: "the symmetric memory of a rank".into(),
            need_bytes: num_bytes as u64,
            have_bytes: 0,
            change: "the allocator refused; lower max_tokens, max_rows or the number of ranks".into(),
        };
        let align = if num_bytes >= HUGE_PAGE { HUGE_PAGE } else { PAGE };
        let layout = Layout::from_size_align(num_bytes.max(1), align).map_err(|_| too_much())?;
        // SAFETY: the layout has a size above 0.
        let start = unsafe { alloc_zeroed(layout) };
        let start = NonNull::new(start).ok_or_else(too_much)?;
        #[cfg(target_os = "linux")]
        if align == HUGE_PAGE {
            let whole_pages = num_bytes / HUGE_PAGE * HUGE_PAGE;
            // SAFETY: the range lies inside the allocation, and this advice changes no byte of it. A kernel that refuses loses speed only.
            let _ = unsafe { rustix::mm::madvise(start.as_ptr().cast(), whole_pages, rustix::mm::Advice::LinuxHugepage) };
        }
        Ok(Symmetric { start, layout })
    }

    fn checked(&self, offset: usize, len: usize) -> *mut u8 {
        let end = offset.checked_add(len);
        assert!(end.is_some_and(|end| end <= self.layout.size()), "bytes {offset} + {len} of symmetric memory of {}", self.layout.size());
        self.start.as_ptr().wrapping_add(offset)
    }

    /// `len` bytes from `offset` on.
    ///
    /// # Safety
    /// Nobody writes these bytes while the reference lives.
    pub unsafe fn bytes(&self, offset: usize, len: usize) -> &[u8] {
        // SAFETY: in bounds (checked), initialised (zeroed at first), alive as long as self, and the caller excludes writers.
        unsafe { std::slice::from_raw_parts(self.checked(offset, len), len) }
    }

    /// `len` bytes from `offset` on, to be written.
    ///
    /// # Safety
    /// Nobody else reads or writes these bytes while the reference lives.
    #[allow(clippy::mut_from_ref)]
    pub unsafe fn bytes_mut(&self, offset: usize, len: usize) -> &mut [u8] {
        // SAFETY: in bounds (checked), initialised (zeroed at first), alive as long as self, and the caller excludes everybody else.
        unsafe { std::slice::from_raw_parts_mut(self.checked(offset, len), len) }
    }
}

impl Drop for Symmetric {
    fn drop(&mut self) {
        // SAFETY: allocated in `new` with this layout.
        unsafe { dealloc(self.start.as_ptr(), self.layout) };
    }
}
