//! Where UCX's own words go.

use std::fs::File;
use std::io;
use std::os::fd::AsFd as _;

/// The process's standard output, whose descriptor is standard error's from here on: UCX decides at load, before `main`, that its log goes
/// to that descriptor, and what a program prints for other programs must not stand among its warnings.
pub(crate) fn take_stdout() -> io::Result<File> {
    let taken = io::stdout().as_fd().try_clone_to_owned()?;
    // SAFETY: takes two numbers of descriptors and touches no memory.
    if unsafe { libc::dup2(libc::STDERR_FILENO, libc::STDOUT_FILENO) } < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(File::from(taken))
}
