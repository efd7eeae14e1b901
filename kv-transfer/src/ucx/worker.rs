//! The UCX worker: progress, writes that come as messages, wake-ups.

use super::context::Context;
use super::operation::{Done, DoneList};
use super::status::Status;
use super::{HEADER_BYTES_MAX, Token};
use std::cell::RefCell;
use std::ffi::c_void;
use std::mem::zeroed;
use std::os::fd::AsRawFd;
use std::ptr::null_mut;
use std::rc::Rc;
use ucx_sys::sys;

/// Id of the active messages whose bytes go to a [`Landing`].
pub(super) const WRITE_ID: u32 = 1;

/// Stores writes that come as messages. Called while the worker progresses, with UCX's own buffer.
pub(crate) trait Landing {
    /// Stores one write; `header` says where.
    fn land(&self, header: &[u8], bytes: &[u8]);
}

/// What callbacks fill while the worker progresses.
#[derive(Default)]
pub(super) struct Lists {
    /// Endpoints that failed, by their owner's number.
    pub(super) failed: RefCell<Vec<(u64, Status)>>,
    /// Messages that were dropped because they break the protocol of this crate.
    refused: RefCell<u64>,
    landing: Option<Rc<dyn Landing>>,
}

/// A UCP worker, in single-threaded mode.
pub(crate) struct Worker {
    pub(super) handle: sys::ucp_worker_h,
    pub(super) done: DoneList,
    pub(super) lists: Rc<Lists>,
    context: Rc<Context>,
    /// Where its wake-ups are reported.
    _events: Rc<dyn AsRawFd>,
}

impl Worker {
    /// A worker that reports its wake-ups to the epoll set `events`, level-triggered and as number 0, once [`Worker::arm`] has returned
    /// that there is nothing to progress yet. Without a landing it refuses writes.
    pub(crate) fn new(
        context: &Rc<Context>,
        events: Rc<dyn AsRawFd>,
        landing: Option<Rc<dyn Landing>>,
    ) -> Result<Rc<Self>, Status> {
        // SAFETY: all fields of the parameters are numbers and pointers, for which zero is a value.
        let mut params: sys::ucp_worker_params_t = unsafe { zeroed() };
        params.field_mask = u64::from(
            sys::ucp_worker_params_field_UCP_WORKER_PARAM_FIELD_THREAD_MODE
                | sys::ucp_worker_params_field_UCP_WORKER_PARAM_FIELD_EVENT_FD,
        );
        params.event_fd = events.as_raw_fd();
        params.thread_mode = sys::ucs_thread_mode_t_UCS_THREAD_MODE_SINGLE;
        let mut handle = null_mut();
        // SAFETY: the context is live, and so is the epoll set for as long as the worker; `handle` receives the new worker.
        Status::check(unsafe { sys::ucp_worker_create(context.handle, &params, &mut handle) })?;
        let (done, lists) = (DoneList::default(), Rc::new(Lists { landing, ..Lists::default() }));
        let worker = Self { handle, done, lists, context: context.clone(), _events: events };
        worker.handle_by(WRITE_ID, landed)?;
        Ok(Rc::new(worker))
    }

    fn handle_by(&self, id: u32, handler: Handler) -> Result<(), Status> {
        // SAFETY: all fields of the parameters are numbers, pointers and optional functions, for which zero is a value.
        let mut params: sys::ucp_am_handler_param_t = unsafe { zeroed() };
        params.field_mask = u64::from(
            sys::ucp_am_handler_param_field_UCP_AM_HANDLER_PARAM_FIELD_ID
                | sys::ucp_am_handler_param_field_UCP_AM_HANDLER_PARAM_FIELD_CB
                | sys::ucp_am_handler_param_field_UCP_AM_HANDLER_PARAM_FIELD_ARG,
        );
        (params.id, params.cb) = (id, Some(handler));
        params.arg = Rc::as_ptr(&self.lists).cast_mut().cast();
        // SAFETY: the worker is live. The argument points to the lists, which the worker holds until it is destroyed, and with it
        // the last callback.
        Status::check(unsafe { sys::ucp_worker_set_am_recv_handler(self.handle, &params) })
    }

    /// A token that is unique among the operations of this worker's context.
    pub(crate) fn token(&self) -> Token {
        self.context.token()
    }

    /// The address that other workers connect to.
    pub(crate) fn address(&self) -> Result<Vec<u8>, Status> {
        let (mut address, mut len) = (null_mut(), 0);
        // SAFETY: the worker is live; `address` and `len` receive a buffer of UCX's.
        Status::check(unsafe { sys::ucp_worker_get_address(self.handle, &mut address, &mut len) })?;
        // SAFETY: UCX filled `len` bytes there, which are ours until released.
        let bytes = unsafe { std::slice::from_raw_parts(address.cast::<u8>(), len) }.to_vec();
        // SAFETY: the address came from this worker and is used no more.
        unsafe { sys::ucp_worker_release_address(self.handle, address) };
        Ok(bytes)
    }

    /// Whether the caller may sleep on the worker's epoll set.
    pub(crate) fn arm(&self) -> bool {
        // SAFETY: the worker is live.
        unsafe { sys::ucp_worker_arm(self.handle) == sys::ucs_status_t_UCS_OK }
    }

    /// Progresses the worker; returns whether anything moved.
    pub(crate) fn progress(&self) -> bool {
        // SAFETY: the worker is live, and this is not called from a callback: callbacks only fill lists and land writes.
        unsafe { sys::ucp_worker_progress(self.handle) != 0 }
    }

    pub(crate) fn take_done(&self) -> Vec<Done> {
        std::mem::take(&mut self.done.borrow_mut())
    }

    /// Endpoints that failed since the last call, by their owner's number.
    pub(crate) fn take_failed(&self) -> Vec<(u64, Status)> {
        std::mem::take(&mut self.lists.failed.borrow_mut())
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        // SAFETY: endpoints hold the worker, so none is left.
        unsafe { sys::ucp_worker_destroy(self.handle) };
    }
}

/// UCX calls this inside `ucp_worker_progress` for each message, with the worker's lists, header, body and receive parameters.
type Handler = unsafe extern "C" fn(
    *mut c_void,
    *const c_void,
    usize,
    *mut c_void,
    usize,
    *const sys::ucp_am_recv_param_t,
) -> sys::ucs_status_t;

/// UCX's callback for a write that came as a message.
unsafe extern "C" fn landed(
    lists: *mut c_void,
    header: *const c_void,
    header_len: usize,
    data: *mut c_void,
    len: usize,
    param: *const sys::ucp_am_recv_param_t,
) -> sys::ucs_status_t {
    // SAFETY: UCX passes what the handler was set with, and valid parts, for the duration of this call.
    let (lists, parts) = unsafe { (lists_of(lists), parts(header, header_len, data, len, param)) };
    match (&lists.landing, parts) {
        (Some(landing), Some((header, bytes))) => landing.land(header, bytes),
        _ => *lists.refused.borrow_mut() += 1,
    }
    sys::ucs_status_t_UCS_OK
}

/// # Safety
/// `lists` is the argument that a worker set its handlers with, and the call is inside that worker's progress.
unsafe fn lists_of<'a>(lists: *mut c_void) -> &'a Lists {
    // SAFETY: the worker's lists outlive its handlers; no borrow of one exists while UCX progresses.
    unsafe { &*lists.cast_const().cast::<Lists>() }
}

/// Header and body of an eager message with a header that can be one of this crate's.
///
/// # Safety
/// The parts and parameters are those that UCX passed to the handler that is running.
unsafe fn parts<'a>(
    header: *const c_void,
    header_len: usize,
    data: *mut c_void,
    len: usize,
    param: *const sys::ucp_am_recv_param_t,
) -> Option<(&'a [u8], &'a [u8])> {
    // SAFETY: the parameters are valid.
    let rendezvous = unsafe { (*param).recv_attr } & u64::from(sys::ucp_am_recv_attr_t_UCP_AM_RECV_ATTR_FLAG_RNDV) != 0;
    // Senders of this crate send eagerly: then `data` is the message itself, and not a descriptor of one to be fetched.
    if rendezvous || header_len > HEADER_BYTES_MAX {
        return None;
    }
    let part = |at: *const c_void, len: usize| match len {
        0 => &[], // An empty part may be null.
        // SAFETY: UCX passes `len` valid bytes in each part, until the handler returns.
        _ => unsafe { std::slice::from_raw_parts(at.cast::<u8>(), len) },
    };
    Some((part(header, header_len), part(data, len)))
}
