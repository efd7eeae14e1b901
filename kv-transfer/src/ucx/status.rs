//! UCX statuses as results.

use std::fmt;
use ucx_sys::sys;

/// An error of UCX.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct Status(sys::ucs_status_t);

impl Status {
    /// The operation ended because its endpoint was closed.
    pub(crate) const CANCELED: Self = Self(sys::ucs_status_t_UCS_ERR_CANCELED);

    /// Nothing of what was asked for exists here, or nothing by which workers could be connected.
    pub(crate) const NO_DEVICE: Self = Self(sys::ucs_status_t_UCS_ERR_NO_DEVICE);

    /// What was passed is not valid.
    pub(super) const INVALID_PARAM: Self = Self(sys::ucs_status_t_UCS_ERR_INVALID_PARAM);

    /// Success, or the error.
    pub(super) fn check(status: sys::ucs_status_t) -> Result<(), Self> {
        if status == sys::ucs_status_t_UCS_OK { Ok(()) } else { Err(Self(status)) }
    }
}

impl fmt::Display for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(ucx_sys::status_string(self.0))
    }
}

impl fmt::Debug for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self} ({})", self.0)
    }
}
