//! The data plane as the settings ask for it: transport and lanes, the address that peers connect to, and what a worker must have to use them.

use crate::bring_up::Loaded;
use crate::config::WorkerConfig;
use crate::error::WorkerError;
use crate::settings::{TransferSettings, TransportKind};
use baton_kv_transfer::{TransferConfig, TransportChoice, UcxLanes, UcxWrites, inventory};
use baton_node::host::own_address;
use baton_types::Party;
use std::net::IpAddr;

/// What the transfer starts with: the settings, and what of the engine concerns it.
pub(crate) fn transfer_config(
    config: &WorkerConfig,
    party: &Party,
    loaded: &Loaded,
) -> Result<TransferConfig, WorkerError> {
    let transport = transport(&config.transfer)?;
    let settings = TransferConfig::new(party.clone(), loaded.compatibility.clone(), loaded.map.clone(), transport);
    let (limits, encrypt) = (config.transfer.limits.clone(), config.transfer.encrypt);
    let advertise = advertise(&config.transfer);
    Ok(TransferConfig { limits, advertise, encrypt, ..settings })
}

/// The transport options of the settings, as the transfer takes them.
fn transport(settings: &TransferSettings) -> Result<TransportChoice, WorkerError> {
    transport_with(settings, inventory::has_rdma)
}

fn transport_with(
    settings: &TransferSettings,
    has_rdma: impl FnOnce() -> bool,
) -> Result<TransportChoice, WorkerError> {
    let given = |text: &String| Some(text.clone()).filter(|t| !t.is_empty());
    let (bind, named) = (settings.bind, given(&settings.ucx_tls).map(UcxLanes::Named));
    let lanes = match (settings.transport, named) {
        (TransportKind::Tcp, _) => return Ok(TransportChoice::tcp(bind)),
        (TransportKind::Ucx, Some(named)) => named,
        (_, named) if has_rdma() => named.unwrap_or(UcxLanes::Rdma),
        (TransportKind::Auto, _) => return Ok(TransportChoice::tcp(bind)),
        // All peers are on this host.
        (TransportKind::Ucx, None) if bind.is_loopback() => UcxLanes::SharedMemory,
        (TransportKind::Ucx, None) => return Err(WorkerError::NoRdma { bind }),
    };
    let devices = given(&settings.ucx_net_devices);
    Ok(TransportChoice::Ucx { lanes, bind, port: 0, devices, writes: UcxWrites::ByLanes })
}

/// Address that peers connect to, if it is not the bound one: the configured address. If none is configured and the data plane listens at
/// all addresses, it is the one from which this host reaches others.
fn advertise(settings: &TransferSettings) -> Option<IpAddr> {
    settings.advertise.or_else(|| settings.bind.is_unspecified().then(|| own_address(settings.bind)).flatten())
}

/// Refuses lanes without a fence if the instance has no configured name. Peers bound quarantined blocks per name, and a new name at each
/// start would start with a new bound.
pub(crate) fn check_name(named: bool, fences: bool, settings: &TransferSettings) -> Result<(), WorkerError> {
    match named || fences {
        true => Ok(()),
        false => Err(WorkerError::Unnamed { lanes: settings.ucx_tls.clone() }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ucx_is_taken_where_it_has_lanes_that_suit() {
        let chosen = |transport, tls: &str, bind: &str, rdma| {
            let (ucx_tls, bind) = (tls.into(), bind.parse().unwrap());
            let settings = TransferSettings { transport, ucx_tls, bind, ..TransferSettings::default() };
            match transport_with(&settings, || rdma) {
                Ok(TransportChoice::Tcp { .. }) => "tcp".to_owned(),
                Ok(TransportChoice::Ucx { lanes, .. }) => lanes.tls().to_owned(),
                Err(error) => error.to_string(),
            }
        };
        use TransportKind::{Auto, Tcp, Ucx};
        let (here, there) = ("127.0.0.1", "10.0.0.1");
        for (transport, tls, bind, rdma, expected) in [
            (Auto, "", there, false, "tcp"),
            (Auto, "", there, true, "rc,dc,ud"),
            (Auto, "", here, false, "tcp"),
            (Auto, "rc", there, true, "rc"),
            (Auto, "rc", there, false, "tcp"),
            (Ucx, "", there, true, "rc,dc,ud"),
            (Ucx, "", here, false, "posix,sysv,self"),
            (Ucx, "posix,self", there, false, "posix,self"),
            (Tcp, "rc", there, true, "tcp"),
        ] {
            assert_eq!(chosen(transport, tls, bind, rdma), expected, "{transport:?} {tls:?} {bind} {rdma}");
        }
        let told = chosen(Ucx, "", there, false);
        assert!(told.contains("10.0.0.1") && told.contains("tcp"), "{told}");
    }

    #[test]
    fn what_is_published_can_be_connected_to() {
        let published = |bind: &str, advertise: Option<&str>| {
            let (bind, advertise) = (bind.parse().unwrap(), advertise.map(|address| address.parse().unwrap()));
            super::advertise(&TransferSettings { bind, advertise, ..TransferSettings::default() })
        };
        assert_eq!(published("127.0.0.1", None), None);
        assert_eq!(published("0.0.0.0", Some("10.0.0.1")), Some("10.0.0.1".parse().unwrap()));
        // A host without a route has no address to publish; starting the data plane reports that.
        assert!(published("0.0.0.0", None).is_none_or(|address| !address.is_unspecified()));
    }

    #[test]
    fn lanes_without_a_fence_ask_for_a_name_that_lasts() {
        let settings = TransferSettings { ucx_tls: "cma,tcp".into(), ..TransferSettings::default() };
        let refused = check_name(false, false, &settings).unwrap_err().to_string();
        assert!(refused.contains("cma,tcp") && refused.contains("--instance"), "{refused}");
        for (named, fences) in [(true, false), (false, true), (true, true)] {
            assert!(check_name(named, fences, &settings).is_ok());
        }
    }
}
