//! Another process: this very test binary in another role.

use std::io::{BufRead, BufReader, Lines, Write};
use std::process::{Child, ChildStdout, Command, Stdio};

/// A process that is killed with its handle.
pub struct Other {
    child: Child,
    /// Kept open: the test harness of a child says after a minute that it still runs, and ends where nobody could read that.
    _output: Lines<BufReader<ChildStdout>>,
}

impl Drop for Other {
    fn drop(&mut self) {
        self.child.kill().ok();
        self.child.wait().ok();
    }
}

impl Other {
    /// Runs the child's role of this very binary, and reads lines until one starts with `expected`; what follows it there.
    pub fn start(args: &[&str], expected: &str) -> (Self, String) {
        Self::try_start(args, expected).expect("the other process says what it is asked to")
    }

    /// The same; `None` if it ends without such a line.
    pub fn try_start(args: &[&str], expected: &str) -> Option<(Self, String)> {
        Self::start_with(args, &[], expected)
    }

    /// The same, with variables of its own.
    pub fn start_with(args: &[&str], variables: &[(&str, &str)], expected: &str) -> Option<(Self, String)> {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["role_of_the_other_process", "--exact", "--ignored", "--nocapture"])
            .env("BATON_TEST_OTHER_PROCESS", args.join(" "))
            .envs(variables.iter().copied())
            .stdout(Stdio::piped())
            .stderr(Stdio::inherit())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let found = lines
            .by_ref()
            .map_while(Result::ok)
            .find_map(|line| line.split_once(expected).map(|(_, rest)| rest.trim().to_owned()));
        let other = Self { child, _output: lines };
        Some((other, found?))
    }

    /// Whether a stop signal took hold.
    pub fn is_stopped(&self) -> bool {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", self.child.id())).unwrap_or_default();
        stat.rsplit(") ").next().is_some_and(|fields| fields.starts_with('T'))
    }

    pub fn has_ended(&mut self) -> bool {
        self.child.try_wait().unwrap().is_some()
    }

    pub fn signal(&self, name: &str) {
        let status = Command::new("kill").args([name, &self.child.id().to_string()]).status().unwrap();
        assert!(status.success());
    }
}

pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}

pub fn unhex(text: &str) -> Vec<u8> {
    (0..text.len() / 2).map(|i| u8::from_str_radix(&text[2 * i..2 * i + 2], 16).unwrap()).collect()
}

/// Prints a line of its own for [`Other::start`].
pub fn say(line: &str) {
    println!("\n{line}");
    std::io::stdout().flush().unwrap();
}
