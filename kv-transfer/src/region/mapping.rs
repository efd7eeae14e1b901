//! An anonymous memory mapping, unmapped on drop.

use std::io::{Error, ErrorKind};
use std::ptr::{null_mut, with_exposed_provenance_mut};

/// Base and length of a mapping that this value owns. The base is kept as a number: it is only ever used through raw pointers.
pub(super) struct Mapping {
    base: usize,
    len: usize,
}

/// Page size on every supported platform: 4 KiB. A multiple of it is valid with larger pages too, because `mmap` rounds up.
const PAGE_BYTES: usize = 4096;

impl Mapping {
    pub(super) fn anonymous(bytes: usize) -> Result<Self, Error> {
        let len = bytes.max(1).checked_next_multiple_of(PAGE_BYTES).filter(|&len| len <= isize::MAX as usize);
        let len = len.ok_or_else(|| Error::new(ErrorKind::OutOfMemory, "the size overflows"))?;
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        // SAFETY: a new anonymous mapping at an address of the kernel's choice touches no existing memory.
        let base = unsafe { libc::mmap(null_mut(), len, protection, flags, -1, 0) };
        if base == libc::MAP_FAILED {
            return Err(Error::last_os_error());
        }
        // Advice only: without huge pages everything works, with more TLB misses, so a refusal is not an error.
        // SAFETY: the range is the mapping just made.
        unsafe { libc::madvise(base, len, libc::MADV_HUGEPAGE) };
        Ok(Self { base: base.expose_provenance(), len })
    }

    pub(super) fn base(&self) -> *mut u8 {
        with_exposed_provenance_mut(self.base)
    }

    pub(super) fn len(&self) -> usize {
        self.len
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: `base` and `len` are exactly what `mmap` returned, and the mapping is not used after its owner is dropped.
        unsafe { libc::munmap(self.base().cast(), self.len) };
    }
}
