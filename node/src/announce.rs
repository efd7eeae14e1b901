//! What a process tells the one that started it: one JSON object a line on stdout, where it is asked to (`--announce`).

use serde::{Deserialize, Serialize};
use std::io::Write;
use std::net::SocketAddr;

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum Announcement {
    /// Something that takes a while is this far, 0 to 1.
    Progress {
        /// What, in two or three words.
        what: String,
        fraction: f32,
    },
    /// The process answers at these addresses.
    Listening {
        grpc: SocketAddr,
        /// HTTP: the OpenAI API on a router, health and metrics on a worker.
        http: SocketAddr,
        /// Where workers join a router, and operators ask it.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        cluster: Option<SocketAddr>,
    },
    /// A request would be served.
    Ready,
}

/// Writes announcements to stdout, or nowhere.
#[derive(Clone, Copy, Debug, Default)]
pub struct Announcer {
    enabled: bool,
}

impl Announcer {
    /// An announcer that speaks where `enabled`.
    pub fn new(enabled: bool) -> Self {
        Self { enabled }
    }

    /// Announces. A closed stdout is the starter's death, which is noticed elsewhere.
    pub fn say(self, announcement: &Announcement) {
        if self.enabled
            && let Ok(line) = serde_json::to_string(announcement)
        {
            let mut out = std::io::stdout().lock();
            let _ = writeln!(out, "{line}").and_then(|()| out.flush());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn announcements_are_json_lines() {
        let at = |port| ([127, 0, 0, 1], port).into();
        let listening = Announcement::Listening { grpc: at(1), http: at(2), cluster: None };
        let text = serde_json::to_string(&listening).unwrap();
        assert_eq!(text, r#"{"event":"listening","grpc":"127.0.0.1:1","http":"127.0.0.1:2"}"#);
        assert_eq!(serde_json::from_str::<Announcement>(&text).unwrap(), listening);
    }
}
