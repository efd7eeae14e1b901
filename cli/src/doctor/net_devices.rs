//! Network devices, named as in `UCX_NET_DEVICES`.

use std::str::FromStr;

/// Most devices that UCX distinguishes in its list (`ucp_is_resource_in_device_list`).
const NAMES_MAX: usize = 64;

/// Which devices UCX may use: `mlx5_0:1,mlx5_1:1`, `mlx5_[0-3]:1`, `^mlx5_2` for all but these, or `all`. An empty list names none, as in
/// the settings of a worker.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct NetDevices {
    text: String,
    names: Vec<String>,
    are_left_out: bool,
}

impl FromStr for NetDevices {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (list, are_left_out) = text.strip_prefix('^').map_or((text, false), |rest| (rest, true));
        let names: Vec<String> = list.split(',').filter(|name| !name.is_empty()).flat_map(expand).collect();
        if names.len() > NAMES_MAX {
            return Err(format!("{text:?} names more than {NAMES_MAX} devices"));
        }
        match names.iter().position(|name| name == "all") {
            Some(_) if names.len() > 1 || are_left_out => Err(format!("{text:?}: `all` stands alone")),
            Some(_) => Ok(Self { text: text.into(), names: Vec::new(), are_left_out: true }),
            None if names.is_empty() && !text.is_empty() => Err(format!("{text:?} names no device")),
            None => Ok(Self { text: text.into(), names, are_left_out }),
        }
    }
}

/// `mlx5_[0-3]:1` is four names; a name without such a range is one. One more than the maximum is enough to be refused.
fn expand(name: &str) -> Vec<String> {
    let range = || {
        let (before, rest) = name.split_once('[')?;
        let (range, after) = rest.split_once(']')?;
        let (first, last) = range.split_once('-')?;
        let (first, last): (u32, u32) = (first.parse().ok()?, last.parse().ok()?);
        let names = (first..=last).take(NAMES_MAX + 1).map(|at| format!("{before}{at}{after}"));
        (first <= last).then(|| names.collect())
    };
    range().unwrap_or_else(|| vec![name.to_owned()])
}

impl NetDevices {
    /// The list as it was given; `None` if none was.
    pub(super) fn given(&self) -> Option<&str> {
        Some(self.text.as_str()).filter(|text| !text.is_empty())
    }

    /// Names of devices that must exist.
    pub(super) fn named(&self) -> &[String] {
        if self.are_left_out { &[] } else { &self.names }
    }

    /// Whether UCX uses this device, `eth0` or `mlx5_0:1`: a name without a port stands for every port of a device.
    pub(super) fn takes(&self, device: &str) -> bool {
        let listed = self.names.iter().any(|name| covers(name, device));
        self.given().is_none() || listed != self.are_left_out
    }
}

/// Whether a name of the list is that of this device, or of the device that this port belongs to.
pub(super) fn covers(name: &str, device: &str) -> bool {
    name == device || device.split_once(':').is_some_and(|(of, _)| name == of)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_are_read_as_ucx_reads_them() {
        let ports = ["mlx5_0:1", "mlx5_0:2", "mlx5_1:1", "mlx5_2:1", "eth0"];
        for (text, takes) in [
            ("", &[0, 1, 2, 3, 4][..]),
            ("all", &[0, 1, 2, 3, 4]),
            ("mlx5_0:1", &[0]),
            ("mlx5_0", &[0, 1]),
            ("mlx5_0:2,,eth0", &[1, 4]),
            ("mlx5_[0-1]:1", &[0, 2]),
            ("^mlx5_0,mlx5_1:1", &[3, 4]),
            ("mlx5", &[]),
        ] {
            let devices: NetDevices = text.parse().unwrap();
            let taken: Vec<usize> = (0..ports.len()).filter(|&at| devices.takes(ports[at])).collect();
            assert_eq!(taken, takes, "{text}");
        }
    }

    #[test]
    fn only_what_is_asked_for_has_to_be_there() {
        let named = |text: &str| text.parse::<NetDevices>().unwrap().named().join(" ");
        assert_eq!(named("mlx5_[8-10]:1,eth0"), "mlx5_8:1 mlx5_9:1 mlx5_10:1 eth0");
        assert_eq!(named("mlx5_[3-1]"), "mlx5_[3-1]");
        assert_eq!((named("^mlx5_0"), named("all"), named("")), Default::default());
    }

    #[test]
    fn what_means_nothing_is_refused() {
        for text in ["^", ",", "all,eth0", "^all", "mlx5_[0-4000000000]", "a[0-40],b[0-40]"] {
            assert!(text.parse::<NetDevices>().is_err(), "{text}");
        }
    }
}
