//! A memory mapping, unmapped on drop.

use std::io::{Error, ErrorKind};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::ptr::{null_mut, with_exposed_provenance_mut};

/// Base and length of a mapping that this value owns. The base is kept as a number: it is only ever used through raw pointers.
pub(super) struct Mapping {
    base: usize,
    len: usize,
}

/// Where the system says whether it gives huge pages: always, to those who ask, or never.
const HUGE_PAGES: &str = "/sys/kernel/mm/transparent_hugepage/enabled";

/// Page size on every supported platform: 4 KiB. A multiple of it is valid with larger pages too, because `mmap` rounds up.
const PAGE_BYTES: usize = 4096;

impl Mapping {
    /// Private zeros. Pages are taken from the system when they are first touched.
    pub(super) fn anonymous(bytes: usize) -> Result<Self, Error> {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        Self::map(whole_pages(bytes)?, libc::PROT_READ | libc::PROT_WRITE, flags, -1)
    }

    /// The same zeros twice: a mapping to read and write, and one that nobody may access.
    pub(super) fn twice(bytes: usize) -> Result<[Self; 2], Error> {
        let len = whole_pages(bytes)?;
        // SAFETY: the name is a terminated string.
        let file = unsafe { libc::memfd_create(c"baton-pool".as_ptr(), libc::MFD_CLOEXEC) };
        if file < 0 {
            return Err(Error::last_os_error());
        }
        // SAFETY: a new descriptor that nobody else has.
        let file = unsafe { OwnedFd::from_raw_fd(file) };
        let size = libc::off_t::try_from(len).map_err(|_| Error::from(ErrorKind::OutOfMemory))?;
        // SAFETY: the descriptor is open; the call touches no memory.
        if unsafe { libc::ftruncate(file.as_raw_fd(), size) } < 0 {
            return Err(Error::last_os_error());
        }
        let of = |protection| Self::map(len, protection, libc::MAP_SHARED | libc::MAP_NORESERVE, file.as_raw_fd());
        Ok([of(libc::PROT_READ | libc::PROT_WRITE)?, of(libc::PROT_NONE)?])
    }

    fn map(len: usize, protection: i32, flags: i32, file: i32) -> Result<Self, Error> {
        // SAFETY: a new mapping at an address of the kernel's choice touches no existing memory.
        let base = unsafe { libc::mmap(null_mut(), len, protection, flags, file, 0) };
        if base == libc::MAP_FAILED {
            return Err(Error::last_os_error());
        }
        Ok(Self { base: base.expose_provenance(), len })
    }

    /// Asks for huge pages.
    ///
    /// # Errors
    /// If the system has none, or by its `setting` gives none to anybody.
    pub(super) fn advise_huge_pages(&self, setting: &str) -> Result<(), Error> {
        // The system accepts the advice even then.
        if setting.contains("[never]") {
            return Err(Error::from_raw_os_error(libc::EINVAL));
        }
        // SAFETY: the range is this mapping; the advice changes no contents.
        match unsafe { libc::madvise(self.base().cast(), self.len, libc::MADV_HUGEPAGE) } {
            0 => Ok(()),
            _ => Err(Error::last_os_error()),
        }
    }

    pub(super) fn base(&self) -> *mut u8 {
        with_exposed_provenance_mut(self.base)
    }
}

/// The system's setting of huge pages; empty if it says none.
pub(super) fn huge_pages_setting() -> String {
    std::fs::read_to_string(HUGE_PAGES).unwrap_or_default()
}

fn whole_pages(bytes: usize) -> Result<usize, Error> {
    let len = bytes.max(1).checked_next_multiple_of(PAGE_BYTES).filter(|&len| len <= isize::MAX as usize);
    len.ok_or_else(|| Error::new(ErrorKind::OutOfMemory, "the size overflows"))
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: `base` and `len` are exactly what `mmap` returned, and the mapping is not used after its owner is dropped.
        unsafe { libc::munmap(self.base().cast(), self.len) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_system_that_gives_no_huge_pages_counts_as_one_that_refuses() {
        let mapping = Mapping::anonymous(4 << 20).unwrap();
        let refused = mapping.advise_huge_pages("always madvise [never]\n").unwrap_err();
        assert_eq!(refused.raw_os_error(), Some(libc::EINVAL));
        if !huge_pages_setting().is_empty() {
            mapping.advise_huge_pages("always [madvise] never\n").unwrap();
        }
    }
}
