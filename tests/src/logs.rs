//! Error lines of this process's logs and of other processes' logs. ERROR means that a person must look, so no test may cause one
//! unnoticed.

use anyhow::ensure;
use parking_lot::Mutex;
use std::io::Write;

static ERRORS: Mutex<Vec<String>> = Mutex::new(Vec::new());

#[derive(Default)]
struct Keep;

impl Write for Keep {
    fn write(&mut self, line: &[u8]) -> std::io::Result<usize> {
        ERRORS.lock().push(String::from_utf8_lossy(line).into_owned());
        Ok(line.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// UCX's messages if a peer closed a connection, or was killed, after it announced its shared memory and before this process attached to
/// it. `mm_ep.c` repeats the failure of the other two.
const PEER_IS_GONE: [&str; 3] = ["mm_sysv.c", "mm_posix.c", "mm ep failed to connect to remote FIFO"];

/// Lines of another process's log that no test may cause.
pub fn bad_lines(log: &str) -> impl Iterator<Item = &str> {
    let is_bad = |line: &&str| line.contains(" ERROR ") || line.contains("panicked at");
    log.lines().filter(is_bad).filter(|line| !PEER_IS_GONE.iter().any(|source| line.contains(source)))
}

/// Records error lines from now on, of all tests in this process.
pub fn watch() {
    let keep = tracing_subscriber::fmt().with_max_level(tracing::Level::ERROR).with_ansi(false);
    // A second test of the process finds it installed.
    let _ = keep.with_writer(Keep::default).try_init();
}

/// Fails if anything logged an error since [`watch`].
pub fn no_errors() -> anyhow::Result<()> {
    let errors = ERRORS.lock();
    ensure!(errors.is_empty(), "unexpected errors in the logs:\n{}", errors.concat());
    Ok(())
}
