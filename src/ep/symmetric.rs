//! Memory that every rank of a world writes and reads: of one process, or shared by processes through a file without a name.
//!
//! References into it are made per access, for exactly the bytes of that access; that no two of them conflict is what the protocol
//! (`PROTOCOL.md`) guarantees, and each caller names the step that does.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::marker::PhantomData;
use std::ops::Deref;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use super::page::RankPage;
use crate::error::{Error, Result};

/// Zeroed bytes shared by the ranks of a world.
#[derive(Debug)]
pub(crate) struct Symmetric {
    start: NonNull<u8>,
    num_bytes: usize,
    owner: Owner,
}

/// Where the bytes came from.
#[derive(Debug)]
enum Owner {
    /// The allocator of this process.
    Heap(Layout),
    /// A mapping of a file; the process that made the file keeps it, to pass it on.
    Mapped { file: Option<OwnedFd> },
}

// SAFETY: the bytes are owned by this value and accessed only through `bytes`, `bytes_mut` and atomics; callers of the first two exclude conflicts.
unsafe impl Send for Symmetric {}
// SAFETY: as above.
unsafe impl Sync for Symmetric {}

/// Alignment of the memory (derived: a page of the machine's small pages; a huge page for what fills one).
const PAGE: usize = 4096;
const HUGE_PAGE: usize = 2 << 20;

fn refused(num_bytes: usize, who: &str) -> Error {
    Error::Memory {
        what: "the symmetric memory of a rank".into(),
        need_bytes: num_bytes as u64,
        have_bytes: 0,
        change: format!("{who} refused; lower max_tokens, max_rows or the number of ranks"),
    }
}

impl Symmetric {
    /// `num_bytes` zeros of this process, aligned to a page.
    pub fn new(num_bytes: usize) -> Result<Self> {
        let too_much = || refused(num_bytes, "the allocator");
        let align = if num_bytes >= HUGE_PAGE { HUGE_PAGE } else { PAGE };
        let layout = Layout::from_size_align(num_bytes.max(1), align).map_err(|_| too_much())?;
        // SAFETY: the layout has a size above 0.
        let start = unsafe { alloc_zeroed(layout) };
        let start = NonNull::new(start).ok_or_else(too_much)?;
        let memory = Symmetric { start, num_bytes: layout.size(), owner: Owner::Heap(layout) };
        memory.advise_huge_pages();
        Ok(memory)
    }

    /// `num_bytes` zeros that other processes can map: they get the [`file`](Self::file).
    ///
    /// # Errors
    /// `Io` when the system has no such files, `Memory` when it has no room.
    #[cfg(target_os = "linux")]
    pub fn shared(num_bytes: usize) -> Result<Self> {
        use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
        let num_bytes = num_bytes.max(1).next_multiple_of(PAGE);
        let io = |error: rustix::io::Errno| Error::Io { what: "making shared memory".into(), why: error.to_string() };
        let file = memfd_create("moe-kernels", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).map_err(io)?;
        ftruncate(&file, num_bytes as u64).map_err(|_| refused(num_bytes, "the system"))?;
        // A file that cannot shrink: reading a mapping of it cannot fault.
        fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL).map_err(io)?;
        let mut memory = Self::map(file.as_fd())?;
        memory.owner = Owner::Mapped { file: Some(file) };
        Ok(memory)
    }

    /// The memory that another process made with [`shared`](Self::shared).
    ///
    /// # Errors
    /// `Io` for a file that is not such memory, `Memory` when it cannot be mapped.
    #[cfg(target_os = "linux")]
    pub fn map(file: BorrowedFd<'_>) -> Result<Self> {
        use rustix::fs::{SealFlags, fcntl_get_seals, fstat};
        use rustix::mm::{MapFlags, ProtFlags, mmap};
        let io = |why: String| Error::Io { what: "mapping shared memory of a rank".into(), why };
        let seals = fcntl_get_seals(file).map_err(|e| io(e.to_string()))?;
        if !seals.contains(SealFlags::SHRINK) {
            return Err(io("the file may shrink".into()));
        }
        let num_bytes = fstat(file).map_err(|e| io(e.to_string()))?.st_size as usize;
        let too_much = |_| refused(num_bytes, "the system");
        // SAFETY: a new mapping at an address that the system chooses replaces nothing; the file cannot shrink below it (sealed).
        let start = unsafe { mmap(std::ptr::null_mut(), num_bytes, ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED, file, 0) };
        let start = NonNull::new(start.map_err(too_much)?.cast()).ok_or_else(|| io("no address".into()))?;
        let memory = Symmetric { start, num_bytes, owner: Owner::Mapped { file: None } };
        memory.advise_huge_pages();
        Ok(memory)
    }

    fn advise_huge_pages(&self) {
        #[cfg(target_os = "linux")]
        if self.num_bytes >= HUGE_PAGE {
            let whole_pages = self.num_bytes / HUGE_PAGE * HUGE_PAGE;
            // SAFETY: the range lies inside the memory, and this advice changes no byte of it. A kernel that refuses loses speed only.
            let _ = unsafe { rustix::mm::madvise(self.start.as_ptr().cast(), whole_pages, rustix::mm::Advice::LinuxHugepage) };
        }
    }

    /// The file that another process maps: of memory that this process made to be shared.
    pub fn file(&self) -> Option<BorrowedFd<'_>> {
        match &self.owner {
            Owner::Mapped { file: Some(file) } => Some(file.as_fd()),
            _ => None,
        }
    }

    /// How many bytes there are: as many as were asked for, or up to the end of the last page.
    pub fn num_bytes(&self) -> usize {
        self.num_bytes
    }

    fn checked(&self, offset: usize, len: usize) -> *mut u8 {
        let end = offset.checked_add(len);
        assert!(end.is_some_and(|end| end <= self.num_bytes), "bytes {offset} + {len} of symmetric memory of {}", self.num_bytes);
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
        match self.owner {
            // SAFETY: allocated in `new` with this layout.
            Owner::Heap(layout) => unsafe { dealloc(self.start.as_ptr(), layout) },
            #[cfg(target_os = "linux")]
            // SAFETY: mapped in `map` with this length; every reference into it borrows self or, for `Words`, holds it.
            Owner::Mapped { .. } => drop(unsafe { rustix::mm::munmap(self.start.as_ptr().cast(), self.num_bytes) }),
            #[cfg(not(target_os = "linux"))]
            Owner::Mapped { .. } => {}
        }
    }
}

/// What may be shared by processes: any bytes are a value of it, zeros too, and a shared reference changes it through atomics alone.
///
/// # Safety
/// Both must hold.
pub(crate) unsafe trait Atomic: Sync {}

// SAFETY: an atomic integer.
unsafe impl Atomic for AtomicU64 {}
// SAFETY: `repr(C)`, of atomic integers and bytes of padding that nothing reads.
unsafe impl Atomic for RankPage {}

/// Atomics inside symmetric memory, which lives as long as they do. No byte of them is accessed in another way.
#[derive(Debug)]
pub(crate) struct Words<T: Atomic> {
    /// Inside `memory`: kept so that an access costs no arithmetic.
    start: NonNull<T>,
    len: usize,
    _memory: Arc<Symmetric>,
    _words: PhantomData<T>,
}

// SAFETY: it is a shared reference to atomics, together with what keeps them alive.
unsafe impl<T: Atomic> Send for Words<T> {}
// SAFETY: as above.
unsafe impl<T: Atomic> Sync for Words<T> {}

impl<T: Atomic> Words<T> {
    /// `len` values from byte `offset` of `memory` on.
    ///
    /// # Panics
    /// When they are not inside, or not aligned.
    pub fn new(memory: Arc<Symmetric>, offset: usize, len: usize) -> Self {
        let start = memory.checked(offset, len.checked_mul(size_of::<T>()).expect("a size in memory")).cast::<T>();
        assert!(start.is_aligned(), "words at byte {offset} are not aligned");
        Words { start: NonNull::new(start).expect("memory is not at 0"), len, _memory: memory, _words: PhantomData }
    }
}

impl<T: Atomic> Deref for Words<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        // SAFETY: in bounds and aligned (checked in `new`), valid for any bytes (`Atomic`), alive as long as the memory that self holds.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use std::sync::atomic::Ordering;

    use super::*;

    #[test]
    fn two_mappings_are_one_memory() {
        let first = Arc::new(Symmetric::shared(10_000).unwrap());
        let second = Arc::new(Symmetric::map(first.file().unwrap()).unwrap());
        assert_eq!((first.num_bytes(), second.num_bytes()), (12_288, 12_288));
        assert!(second.file().is_none());
        let words = [&first, &second].map(|memory| Words::<AtomicU64>::new(memory.clone(), 64, 3));
        words[0][2].store(7, Ordering::Relaxed);
        assert_eq!(words[1].iter().map(|w| w.load(Ordering::Relaxed)).collect::<Vec<_>>(), [0, 0, 7]);
        drop(first);
        assert_eq!(words[1][2].load(Ordering::Relaxed), 7);
    }

    #[test]
    fn a_file_that_may_shrink_is_refused() {
        let file = rustix::fs::memfd_create("moe-kernels-test", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&file, 4096).unwrap();
        assert!(matches!(Symmetric::map(file.as_fd()), Err(Error::Io { .. })));
    }

    #[test]
    #[should_panic(expected = "symmetric memory of 4096")]
    fn words_outside_are_refused() {
        Words::<AtomicU64>::new(Arc::new(Symmetric::new(4096).unwrap()), 4088, 2);
    }
}
