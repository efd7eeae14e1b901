//! Announcements to the process that started this one: one JSON object per line on stdout, if enabled (`--announce`).

use serde::{Deserialize, Serialize};
use std::io::Write;
use std::net::SocketAddr;

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum Announcement {
    /// Progress of a slow step, 0 to 1.
    Progress {
        /// Name of the step, in two or three words.
        what: String,
        fraction: f32,
    },
    /// The process serves these addresses.
    Listening {
        grpc: SocketAddr,
        /// HTTP: the OpenAI API on a router, health and metrics on a worker.
        http: SocketAddr,
        /// Where workers register with a router, and operators call it.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        cluster: Option<SocketAddr>,
    },
    /// A request would be served.
    Ready,
    /// No request will be served.
    Refused {
        /// For people.
        reason: String,
    },
}

/// Writes announcements to stdout, or nowhere.
#[derive(Clone, Copy, Debug, Default)]
pub struct Announcer {
    enabled: bool,
}

impl Announcer {
    /// An announcer that writes if `enabled`.
    pub fn new(enabled: bool) -> Self {
        Self { enabled }
    }

    /// Whether someone reads what is announced.
    pub fn is_enabled(self) -> bool {
        self.enabled
    }

    /// Writes an announcement. If stdout is closed, the starting process is gone; other code detects that.
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
