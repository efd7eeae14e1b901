//! Network devices: which of them UCX is to use, so that it listens where the operator said and nowhere else.

use std::ffi::CStr;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::ptr::null_mut;

/// An address of a device.
type DeviceAddress = (String, IpAddr);

/// Value of `UCX_NET_DEVICES` with which UCX listens at `bind` only, of this host as it is now.
///
/// Left to itself UCX listens on every device, and a write emulated over TCP is stored wherever it says. UCX knows devices and not
/// addresses: what cannot be said to it is refused here, in words for the operator.
pub(crate) fn devices_at(bind: IpAddr) -> Result<String, String> {
    let addresses = addresses().map_err(|e| format!("cannot list the addresses of this host: {e}"))?;
    choose(&addresses, bind)
}

/// Any loopback address stands for the loopback device, whichever address UCX takes of it.
fn choose(addresses: &[DeviceAddress], bind: IpAddr) -> Result<String, String> {
    if bind.is_unspecified() {
        return Ok("all".into());
    }
    let at = |address: &IpAddr| *address == bind || (bind.is_loopback() && address.is_loopback());
    let device = addresses.iter().find(|(_, address)| at(address)).map(|(device, _)| device);
    let device = device.ok_or_else(|| format!("no network device of this host has the address {bind}"))?;
    // UCX takes the first address of a device, passing over link-local ones (`ucs_netif_get_addr`).
    let mut candidates = addresses
        .iter()
        .filter(|(name, address)| name == device && address.is_ipv4() == bind.is_ipv4() && !is_link_local(address));
    match candidates.next() {
        Some((_, first)) if at(first) => Ok(device.clone()),
        Some((_, first)) => Err(format!("UCX would listen at {first}, the first address of {device}, not at {bind}")),
        None => Err(format!("UCX takes no address like {bind} of {device}")),
    }
}

fn is_link_local(address: &IpAddr) -> bool {
    match address {
        IpAddr::V4(v4) => v4.is_link_local(),
        IpAddr::V6(v6) => v6.is_unicast_link_local(),
    }
}

/// Every IP address of this host with its device, in the order of the system's list, which UCX reads too.
fn addresses() -> io::Result<Vec<DeviceAddress>> {
    let mut list = null_mut();
    // SAFETY: `list` receives a list, or the call fails.
    if unsafe { libc::getifaddrs(&mut list) } != 0 {
        return Err(io::Error::last_os_error());
    }
    let (mut found, mut at) = (Vec::new(), list);
    // SAFETY: each link of the list is null or an entry, valid until the list is freed below.
    while let Some(entry) = unsafe { at.as_ref() } {
        if !entry.ifa_addr.is_null() {
            // SAFETY: names are terminated strings of the list.
            let name = unsafe { CStr::from_ptr(entry.ifa_name) }.to_string_lossy();
            // An alias, `eth0:1`, is another address of the device.
            let device = name.split(':').next().unwrap_or_default().to_owned();
            // SAFETY: the entry's address is not null.
            found.extend(unsafe { ip_of(entry.ifa_addr) }.map(|address| (device, address)));
        }
        at = entry.ifa_next;
    }
    // SAFETY: the list came from `getifaddrs` and is used no more.
    unsafe { libc::freeifaddrs(list) };
    Ok(found)
}

/// # Safety
/// `address` points to a socket address as long as its family says.
unsafe fn ip_of(address: *const libc::sockaddr) -> Option<IpAddr> {
    // SAFETY: every socket address begins with its family.
    match i32::from(unsafe { (*address).sa_family }) {
        libc::AF_INET => {
            // SAFETY: the family says that this is an IPv4 address.
            let v4 = unsafe { &*address.cast::<libc::sockaddr_in>() };
            Some(Ipv4Addr::from(u32::from_be(v4.sin_addr.s_addr)).into())
        }
        libc::AF_INET6 => {
            // SAFETY: the family says that this is an IPv6 address.
            let v6 = unsafe { &*address.cast::<libc::sockaddr_in6>() };
            Some(Ipv6Addr::from(v6.sin6_addr.s6_addr).into())
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bind_is_one_device_or_refused() {
        let host = [
            ("lo", "127.0.0.1"),
            ("eth0", "169.254.1.1"),
            ("eth0", "10.0.0.1"),
            ("eth0", "10.0.0.2"),
            ("ib0", "10.1.0.1"),
            ("lo", "::1"),
            ("eth0", "fe80::1"),
            ("eth0", "fd00::1"),
        ];
        let host = host.map(|(device, address)| (device.to_owned(), address.parse().unwrap()));
        let cases = [
            ("127.0.0.1", Ok("lo")),
            ("127.8.8.8", Ok("lo")),
            ("::1", Ok("lo")),
            ("10.0.0.1", Ok("eth0")),
            ("10.1.0.1", Ok("ib0")),
            ("fd00::1", Ok("eth0")),
            ("0.0.0.0", Ok("all")),
            ("::", Ok("all")),
            ("10.0.0.2", Err("10.0.0.1, the first address of eth0")),
            ("169.254.1.1", Err("would listen at 10.0.0.1")),
            ("fe80::1", Err("would listen at fd00::1")),
            ("10.9.9.9", Err("no network device")),
        ];
        for (bind, expected) in cases {
            match (choose(&host, bind.parse().unwrap()), expected) {
                (Ok(found), Ok(expected)) => assert_eq!(found, expected, "{bind}"),
                (Err(found), Err(expected)) => assert!(found.contains(expected), "{bind}: {found}"),
                (found, expected) => panic!("{bind}: {found:?}, not {expected:?}"),
            }
        }
    }

    #[test]
    fn this_host_has_loopback() {
        assert!(addresses().unwrap().iter().any(|(_, address)| address.is_loopback()));
    }
}
