//! Why no KV was moved, and what to do about it.

use baton_kv_transfer::{HandoffFailure, TrialError};
use std::fmt;
use std::time::Duration;

/// Errors between two doctors, apart from those of the connection and of the transfer itself.
#[derive(Debug)]
pub(super) enum Trouble {
    /// The other side cannot do what was requested, for this reason.
    Refused(String),
    /// It was not done within this time.
    Late(Duration),
}

impl fmt::Display for Trouble {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Refused(why) => write!(f, "the other side says: {why}"),
            Self::Late(after) => write!(f, "not done within {after:?}"),
        }
    }
}

impl std::error::Error for Trouble {}

const THERE: &str = "the other host cannot start this transfer: RDMA devices are not found by an address, so start its doctor with \
                     --ucx-net-devices and the names that they have there; what it printed at its start tells its lanes, devices and memlock";
const HERE: &str = "this host cannot start this transfer: see what rdma, ucx and memlock say above; RDMA devices are not found by an address, \
                    so name them in --ucx-net-devices, on the other host too";
const MEMORY: &str = "each side takes 256 MiB for a pool: free so much here";
const PORTS: &str =
    "the service takes a free port at the address connected to: let all TCP ports between both hosts through";
const FABRIC: &str = "the RDMA ports named on both sides do not reach each other: they have to be in one fabric (InfiniBand: subnet and \
                      partition; RoCE: VLAN, routes, UCX_IB_GID_INDEX); `ibv_rc_pingpong` or `ib_write_bw` between them shows it without Baton";
const SLOW: &str = "KV crawls below 10 MB/s: look for a lossy or slow link between both hosts";
const VERSION: &str = "run the same version of baton on both hosts";
const CORRUPT: &str =
    "what arrived is not what was sent: test memory and NIC of both hosts, and let nothing be served there";
const LINE: &str =
    "the doctor on the other host ended or is of another version: look at what it printed last, and start it anew";
const AGAIN: &str = "start both doctors anew, and look at what the other one printed last";

/// The remedy for `error`; `rdma` says whether KV had to go over RDMA.
pub(super) fn remedy(error: &anyhow::Error, rdma: bool) -> &'static str {
    match (error.downcast_ref::<Trouble>(), error.downcast_ref::<TrialError>()) {
        (Some(Trouble::Refused(_)), _) => THERE,
        (Some(Trouble::Late(_)), _) => SLOW,
        (_, Some(TrialError::Memory(_))) => MEMORY,
        (_, Some(TrialError::Service(_))) => HERE,
        (_, Some(TrialError::Failed(failure))) => match failure {
            HandoffFailure::PeerLost(_) | HandoffFailure::Deadline(_) if rdma => FABRIC,
            HandoffFailure::PeerLost(_) | HandoffFailure::Deadline(_) => PORTS,
            HandoffFailure::Incompatible { .. } | HandoffFailure::Protocol(_) => VERSION,
            HandoffFailure::Corrupt(_) => CORRUPT,
            _ => AGAIN,
        },
        (None, None) => LINE,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use anyhow::anyhow;
    use baton_kv_transfer::TransferError;

    #[test]
    fn each_trouble_has_a_remedy_of_its_own() {
        let lost = || TrialError::Failed(HandoffFailure::PeerLost("silent".into()));
        let cases: [(anyhow::Error, bool, &str); 9] = [
            (Trouble::Refused("no device".into()).into(), true, "the other host"),
            (Trouble::Late(Duration::from_secs(1)).into(), true, "slow link"),
            (TrialError::Service(TransferError::Config("bind".into())).into(), false, "this host cannot start"),
            (lost().into(), false, "TCP ports"),
            (lost().into(), true, "one fabric"),
            (TrialError::Failed(HandoffFailure::Deadline("connecting")).into(), true, "one fabric"),
            (TrialError::Failed(HandoffFailure::Protocol("?".into())).into(), true, "same version"),
            (TrialError::Failed(HandoffFailure::Corrupt("?".into())).into(), true, "memory and NIC"),
            (anyhow!("the other side closed the connection"), true, "the doctor on the other host"),
        ];
        for (error, rdma, expected) in cases {
            assert!(remedy(&error, rdma).contains(expected), "{error:#}: {}", remedy(&error, rdma));
        }
    }
}
