//! Redirects UCX's own output.

use std::fs::File;
use std::io;
use std::os::fd::AsFd as _;

/// Takes the process's standard output, whose descriptor refers to standard error from here on. UCX chooses that descriptor for its log at
/// load, before `main`, and a program's output for other programs must not mix with its warnings.
pub(crate) fn take_stdout() -> io::Result<File> {
    let taken = io::stdout().as_fd().try_clone_to_owned()?;
    // SAFETY: takes two numbers of descriptors and touches no memory.
    if unsafe { libc::dup2(libc::STDERR_FILENO, libc::STDOUT_FILENO) } < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(File::from(taken))
}
