//! Endpoints: messages, writes and flushes to one peer.

use super::context::{KeyHead, Memory};
use super::operation::{Keeps, Token, start};
use super::status::Status;
use super::worker::{Lists, WRITE_ID, Worker};
use std::cell::Cell;
use std::ffi::{CStr, c_void};
use std::mem::{size_of, zeroed};
use std::ptr::null_mut;
use std::rc::Rc;
use ucx_sys::sys;

/// Fewest bytes of an address: its version, the worker's number and one device.
const ADDRESS_BYTES_MIN: usize = 16;
/// More than UCX reads past the end of a truncated address or key: at most 128 entries, with lengths of one byte.
const SLACK_BYTES: usize = 64 << 10;

/// A UCP endpoint. A failure of its peer is reported under the owner's number (see [`Worker::take_failed`]).
///
/// Close it with [`Endpoint::close`], whose completion ends every operation on it. An endpoint that is dropped without that is closed by
/// force, and its operations complete while its worker still progresses or is destroyed.
pub(crate) struct Endpoint {
    handle: sys::ucp_ep_h,
    closed: Cell<bool>,
    worker: Rc<Worker>,
    /// The failure callback's argument: our own box, freed with the endpoint.
    failure: *mut Failure,
}

struct Failure {
    owner: u64,
    lists: Rc<Lists>,
}

/// A peer's region, as accessed through one endpoint. Keep it until the endpoint is closed: UCX takes no reference for the writes that use
/// it.
pub(crate) struct RemoteKey {
    handle: sys::ucp_rkey_h,
    _worker: Rc<Worker>,
}

impl Endpoint {
    /// Starts to connect to a worker's address; failures are also reported later.
    pub(crate) fn new(worker: &Rc<Worker>, address: &[u8], owner: u64) -> Result<Self, Status> {
        let address = with_slack(address, ADDRESS_BYTES_MIN)?;
        let failure = Box::into_raw(Box::new(Failure { owner, lists: worker.lists.clone() }));
        // SAFETY: all fields of the parameters are numbers, pointers and optional functions, for which zero is a value.
        let mut params: sys::ucp_ep_params_t = unsafe { zeroed() };
        params.field_mask = u64::from(
            sys::ucp_ep_params_field_UCP_EP_PARAM_FIELD_REMOTE_ADDRESS
                | sys::ucp_ep_params_field_UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE
                | sys::ucp_ep_params_field_UCP_EP_PARAM_FIELD_ERR_HANDLER,
        );
        params.address = address.as_ptr().cast();
        params.err_mode = sys::ucp_err_handling_mode_t_UCP_ERR_HANDLING_MODE_PEER;
        params.err_handler.cb = Some(failed);
        params.err_handler.arg = failure.cast();
        let mut handle = null_mut();
        // SAFETY: the worker is live; the address is borrowed over the call, which copies it; the handler's argument is boxed and outlives
        // the endpoint. The address itself encodes how far UCX reads it. Zeros follow it, but its contents are trusted otherwise, so it
        // must come from a peer that this cluster trusts.
        let created = Status::check(unsafe { sys::ucp_ep_create(worker.handle, &params, &mut handle) });
        let endpoint = Self { handle, closed: Cell::new(created.is_err()), worker: worker.clone(), failure };
        created.map(|()| endpoint)
    }

    /// Sends `len` bytes of the registered region at `offset` to the peer's [`super::Landing`], eagerly.
    ///
    /// # Panics
    /// If the range leaves the region.
    pub(crate) fn send_region(&self, token: Token, header: &[u8], memory: &Rc<Memory>, offset: usize, len: usize) {
        let from = memory.at(offset, len);
        self.post(token, Keeps::Memory { _memory: memory.clone() }, |params| {
            eager(params);
            registered(params, memory);
            let (header, header_len) = (header.as_ptr().cast(), header.len());
            // SAFETY: the endpoint is live; the header is copied by the call; the source lies within the region, which the operation
            // keeps mapped.
            unsafe { sys::ucp_am_send_nbx(self.handle, WRITE_ID, header, header_len, from.cast(), len, params) }
        });
    }

    /// Sends bytes to the peer's [`super::Landing`], eagerly.
    pub(crate) fn send(&self, token: Token, header: &[u8], bytes: Vec<u8>) {
        // A vector that is moved keeps its bytes where they are.
        let (from, len) = (bytes.as_ptr(), bytes.len());
        self.post(token, Keeps::Bytes { _bytes: bytes }, |params| {
            eager(params);
            params.op_attr_mask |= sys::ucp_op_attr_t_UCP_OP_ATTR_FIELD_MEMORY_TYPE;
            params.memory_type = sys::ucs_memory_type_UCS_MEMORY_TYPE_HOST;
            let (header, header_len) = (header.as_ptr().cast(), header.len());
            // SAFETY: the endpoint is live; the header is copied by the call; the operation owns the bytes until it has ended.
            unsafe { sys::ucp_am_send_nbx(self.handle, WRITE_ID, header, header_len, from.cast(), len, params) }
        });
    }

    /// Writes `len` bytes of the registered region at `offset` to the peer's address `to`.
    ///
    /// # Panics
    /// If the range leaves the region.
    pub(crate) fn put(&self, token: Token, memory: &Rc<Memory>, offset: usize, len: usize, to: u64, key: &RemoteKey) {
        let from = memory.at(offset, len);
        self.post(token, Keeps::Memory { _memory: memory.clone() }, |params| {
            registered(params, memory);
            // SAFETY: endpoint and key are live; the source lies within the region, which the operation keeps mapped.
            unsafe { sys::ucp_put_nbx(self.handle, from.cast(), len, to, key.handle, params) }
        });
    }

    /// Reads `len` bytes at the peer's address `from` into the registered region at `offset`.
    ///
    /// # Panics
    /// If the range leaves the region.
    pub(crate) fn get(&self, token: Token, memory: &Rc<Memory>, offset: usize, len: usize, from: u64, key: &RemoteKey) {
        let to = memory.at(offset, len);
        self.post(token, Keeps::Memory { _memory: memory.clone() }, |params| {
            registered(params, memory);
            // SAFETY: endpoint and key are live; the target lies within the region, which the operation keeps mapped and to which no
            // reference exists anywhere.
            unsafe { sys::ucp_get_nbx(self.handle, to.cast(), len, from, key.handle, params) }
        });
    }

    /// Completes once everything posted before is visible at the peer.
    pub(crate) fn flush(&self, token: Token) {
        // SAFETY: the endpoint is live.
        self.post(token, Keeps::Nothing, |params| unsafe { sys::ucp_ep_flush_nbx(self.handle, params) });
    }

    /// Closes by force: every operation on the endpoint ends, cancelled if it was not done, and then this one.
    pub(crate) fn close(&self, token: Token) {
        if self.closed.replace(true) {
            return;
        }
        start(token, &self.worker.done, Keeps::Nothing, |params| {
            params.op_attr_mask |= sys::ucp_op_attr_t_UCP_OP_ATTR_FIELD_FLAGS;
            params.flags = sys::ucp_ep_close_flags_t_UCP_EP_CLOSE_FLAG_FORCE;
            // SAFETY: the endpoint was live, and `closed` prevents any further use of it.
            unsafe { sys::ucp_ep_close_nbx(self.handle, params) }
        });
    }

    fn post(
        &self,
        token: Token,
        keeps: Keeps,
        post: impl FnOnce(&mut sys::ucp_request_param_t) -> sys::ucs_status_ptr_t,
    ) {
        if self.closed.get() {
            let result = Err(Status::CANCELED);
            self.worker.done.borrow_mut().push(super::Done { token, result });
        } else {
            start(token, &self.worker.done, keeps, post);
        }
    }

    /// Unpacks a peer's region key for use on this endpoint.
    pub(crate) fn unpack(&self, key: &[u8]) -> Result<RemoteKey, Status> {
        let key = with_slack(key, KeyHead::BYTES)?;
        let mut handle = null_mut();
        // SAFETY: the endpoint is live; the key is borrowed over the call, which copies it. As of an address, UCX trusts its contents.
        Status::check(unsafe { sys::ucp_ep_rkey_unpack(self.handle, key.as_ptr().cast(), &mut handle) })?;
        Ok(RemoteKey { handle, _worker: self.worker.clone() })
    }

    /// Transports and devices that the endpoint uses, e.g. `tcp/eth0`.
    pub(crate) fn lanes(&self) -> Vec<String> {
        const LANES_MAX: usize = 16;
        if self.closed.get() {
            return Vec::new();
        }
        // SAFETY: entries and attributes are numbers and pointers, for which zero is a value.
        let mut entries: [sys::ucp_transport_entry_t; LANES_MAX] = unsafe { zeroed() };
        // SAFETY: as above.
        let mut attributes: sys::ucp_ep_attr_t = unsafe { zeroed() };
        attributes.field_mask = u64::from(sys::ucp_ep_attr_field_UCP_EP_ATTR_FIELD_TRANSPORTS);
        attributes.transports.entries = entries.as_mut_ptr();
        attributes.transports.num_entries = LANES_MAX as u32;
        attributes.transports.entry_size = size_of::<sys::ucp_transport_entry_t>();
        // SAFETY: the endpoint is live; UCX fills at most `num_entries` entries of the size given.
        if Status::check(unsafe { sys::ucp_ep_query(self.handle, &mut attributes) }).is_err() {
            return Vec::new();
        }
        let found = (attributes.transports.num_entries as usize).min(LANES_MAX);
        let name = |at: *const std::ffi::c_char| match at.is_null() {
            true => "?".into(),
            // SAFETY: UCX's names are terminated and live until the endpoint is closed.
            false => unsafe { CStr::from_ptr(at) }.to_string_lossy(),
        };
        let mut lanes: Vec<_> =
            entries[..found].iter().map(|e| format!("{}/{}", name(e.transport_name), name(e.device_name))).collect();
        lanes.sort();
        lanes.dedup();
        lanes
    }
}

/// A copy of an address or a key for UCX, which is not told its length: after a truncated one it reads zeros.
fn with_slack(bytes: &[u8], bytes_min: usize) -> Result<Vec<u8>, Status> {
    if bytes.len() < bytes_min {
        return Err(Status::INVALID_PARAM);
    }
    Ok([bytes, &[0; SLACK_BYTES]].concat())
}

/// The local side of an operation is registered memory of a known type.
fn registered(params: &mut sys::ucp_request_param_t, memory: &Memory) {
    params.op_attr_mask |= sys::ucp_op_attr_t_UCP_OP_ATTR_FIELD_MEMH | sys::ucp_op_attr_t_UCP_OP_ATTR_FIELD_MEMORY_TYPE;
    params.memh = memory.handle;
    params.memory_type = memory.memory_type;
}

/// Messages without rendezvous, whose receiver would have to fetch and acknowledge, with headers that UCX copies.
fn eager(params: &mut sys::ucp_request_param_t) {
    params.op_attr_mask |= sys::ucp_op_attr_t_UCP_OP_ATTR_FIELD_FLAGS;
    params.flags = sys::ucp_send_am_flags_UCP_AM_SEND_FLAG_EAGER | sys::ucp_send_am_flags_UCP_AM_SEND_FLAG_COPY_HEADER;
}

impl Drop for Endpoint {
    fn drop(&mut self) {
        if !self.closed.get() {
            self.close(self.worker.token());
        }
        // SAFETY: the box was leaked in `new` for the failure callback, which UCX does not call once an endpoint's closing has begun.
        drop(unsafe { Box::from_raw(self.failure) });
    }
}

impl Drop for RemoteKey {
    fn drop(&mut self) {
        // SAFETY: the worker, whose pool the key may lie in, is live. Writes in flight point to the key; its owner keeps it until the
        // endpoint's close has ended them all, or, where that took too long, has purged them from an endpoint that is dropped first.
        unsafe { sys::ucp_rkey_destroy(self.handle) };
    }
}

/// Called by UCX inside `ucp_worker_progress` when the peer is lost.
unsafe extern "C" fn failed(arg: *mut c_void, _: sys::ucp_ep_h, status: sys::ucs_status_t) {
    // SAFETY: `arg` is the endpoint's box, which lives until its closing has begun, and with it the last callback.
    let failure = unsafe { &*arg.cast_const().cast::<Failure>() };
    if let Err(status) = Status::check(status) {
        failure.lists.failed.borrow_mut().push((failure.owner, status));
    }
}
