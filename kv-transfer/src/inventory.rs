//! What this host has to move KV with: for whoever prepares one.

use crate::ucx::{Context, addresses, version};
use std::io;
use std::net::IpAddr;

/// What UCX finds here.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UcxInventory {
    /// Version of the library, e.g. `1.22.0`.
    pub version: String,
    /// Transports with their devices, e.g. `tcp` and `eth0`, in UCX's order.
    pub resources: Vec<(String, String)>,
}

/// Asks UCX for all of it; `tls` narrows the transports as `UCX_TLS` does, `all` does not.
///
/// # Errors
/// In UCX's words, where it cannot start or knows none of these transports.
pub fn ucx(tls: &str) -> Result<UcxInventory, String> {
    let context = Context::new(&[("TLS", tls)]).map_err(|e| e.to_string())?;
    Ok(UcxInventory { version: version(), resources: context.resources() })
}

/// Every IP address of this host with its network device.
///
/// # Errors
/// Where the system does not list them.
pub fn host_addresses() -> io::Result<Vec<(String, IpAddr)>> {
    addresses()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tcp_over_loopback_is_found() {
        let found = ucx("tcp").unwrap();
        assert!(found.version.starts_with("1."), "{found:?}");
        assert!(found.resources.contains(&("tcp".into(), "lo".into())), "{found:?}");
        assert!(host_addresses().unwrap().contains(&("lo".into(), [127, 0, 0, 1].into())));
        assert!(ucx("carrier_pigeon").is_err());
    }
}
