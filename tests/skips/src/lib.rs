//! What a test does where the machine cannot run it, or a part of it: it says so, and where everything is to run, it fails.
//!
//! libtest keeps what passing tests print. A skip is written past it, so that it shows in every run.

use std::fmt::Display;
use std::io::Write as _;

/// Where it is set, only the needs that it names, separated by commas, may be lacking: CI sets it, so that nobody there takes what was
/// skipped for tested. (Not `BATON_…`: services refuse variables of that name that they do not know.)
pub const MAY_SKIP: &str = "TESTS_MAY_SKIP";

/// What tests need of a machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Need {
    /// A processor with AVX2 and FMA.
    Avx2,
    /// A processor with AVX-512 and its extensions VNNI and BF16.
    Avx512,
    /// A processor with AMX (AMX_TILE, AMX_BF16 and AMX_INT8), and a system that lets processes use it.
    Amx,
    /// Network, mount and process namespaces of one's own: root, `unshare`, `ip`, `tc` and a TUN device.
    Namespaces,
    /// A network device besides `lo`.
    SecondDevice,
    /// No RDMA device: what its lack is told like.
    NoRdma,
}

impl Need {
    /// Its name in [`MAY_SKIP`].
    pub const fn name(self) -> &'static str {
        match self {
            Self::Avx2 => "avx2",
            Self::Avx512 => "avx512",
            Self::Amx => "amx",
            Self::Namespaces => "namespaces",
            Self::SecondDevice => "second-device",
            Self::NoRdma => "no-rdma",
        }
    }
}

/// Says that `what` is not tested here, since `need` is lacking, and why.
///
/// # Panics
/// Where [`MAY_SKIP`] is set and does not name the need.
pub fn skipped(need: Need, what: &str, why: impl Display) {
    let line = format!("SKIPPED {what}: this machine lacks {}: {why}\n", need.name());
    // Who cannot be told is not helped by an error either.
    let _ = std::io::stderr().write_all(line.as_bytes());
    let allowed = std::env::var(MAY_SKIP).ok();
    assert!(may(allowed.as_deref(), need), "{MAY_SKIP} does not name {}: {line}", need.name());
}

fn may(allowed: Option<&str>, need: Need) -> bool {
    allowed.is_none_or(|needs| needs.split(',').any(|named| named.trim() == need.name()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn where_needs_are_named_no_other_may_be_lacking() {
        assert!(may(None, Need::Avx2));
        assert!(!may(Some(""), Need::Avx2) && !may(Some("none"), Need::Namespaces));
        assert!(may(Some("namespaces, avx2"), Need::Avx2) && !may(Some("namespaces"), Need::SecondDevice));
    }
}
