//! Another process: this very test binary in another role.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, Command, Stdio};

/// A process that is killed with its handle.
pub struct Other(Child);

impl Drop for Other {
    fn drop(&mut self) {
        self.0.kill().ok();
        self.0.wait().ok();
    }
}

impl Other {
    /// Runs the child's role of this very binary, and reads lines until one starts with `expected`; what follows it there.
    pub fn start(args: &[&str], expected: &str) -> (Self, String) {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["role_of_the_other_process", "--exact", "--ignored", "--nocapture"])
            .env("BATON_TEST_OTHER_PROCESS", args.join(" "))
            .stdout(Stdio::piped())
            .stderr(Stdio::inherit())
            .spawn()
            .unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let found = lines
            .map_while(Result::ok)
            .find_map(|line| line.split_once(expected).map(|(_, rest)| rest.trim().to_owned()));
        (Self(child), found.expect("the other process says what it is asked to"))
    }

    /// Whether a stop signal took hold.
    pub fn is_stopped(&self) -> bool {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", self.0.id())).unwrap_or_default();
        stat.rsplit(") ").next().is_some_and(|fields| fields.starts_with('T'))
    }

    pub fn has_ended(&mut self) -> bool {
        self.0.try_wait().unwrap().is_some()
    }

    pub fn signal(&self, name: &str) {
        let status = Command::new("kill").args([name, &self.0.id().to_string()]).status().unwrap();
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
