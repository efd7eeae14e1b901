//! Operations in flight: each owns what it reads until UCX reports its completion.

use super::context::Memory;
use super::status::Status;
use std::cell::RefCell;
use std::ffi::c_void;
use std::mem::zeroed;
use std::rc::Rc;
use ucx_sys::sys;

/// The owner's identifier of an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Token(pub u64);

#[derive(Clone, Copy, Debug)]
pub(crate) struct Done {
    pub token: Token,
    pub result: Result<(), Status>,
}

/// The list of completed operations.
pub(super) type DoneList = Rc<RefCell<Vec<Done>>>;

/// What an operation keeps alive.
pub(super) enum Keeps {
    /// The region that it reads.
    Memory {
        _memory: Rc<Memory>,
    },
    /// Bytes that it reads.
    Bytes {
        _bytes: Vec<u8>,
    },
    Nothing,
}

struct Operation {
    token: Token,
    done: DoneList,
    _keeps: Keeps,
}

/// Starts an operation: `post` makes the UCX call with the parameters that lead the completion back to `done`.
pub(super) fn start(
    token: Token,
    done: &DoneList,
    keeps: Keeps,
    post: impl FnOnce(&mut sys::ucp_request_param_t) -> sys::ucs_status_ptr_t,
) {
    let operation = Box::into_raw(Box::new(Operation { token, done: done.clone(), _keeps: keeps }));
    // SAFETY: all fields of the parameters are numbers, pointers and optional functions, for which zero is a value.
    let mut params: sys::ucp_request_param_t = unsafe { zeroed() };
    params.op_attr_mask =
        sys::ucp_op_attr_t_UCP_OP_ATTR_FIELD_CALLBACK | sys::ucp_op_attr_t_UCP_OP_ATTR_FIELD_USER_DATA;
    params.cb.send = Some(completed);
    params.user_data = operation.cast();
    let result = match ucx_sys::decode_status_ptr(post(&mut params)) {
        Ok(Some(_)) => return, // In flight: `completed` will own the operation.
        Ok(None) => Ok(()),
        Err(status) => Status::check(status),
    };
    // SAFETY: UCX returned without a request, so it will never call back: the box is still ours alone.
    let operation = unsafe { Box::from_raw(operation) };
    operation.done.borrow_mut().push(Done { token, result });
}

/// Called by UCX, inside `ucp_worker_progress` or a call that closes an endpoint, exactly once for each request.
unsafe extern "C" fn completed(request: *mut c_void, status: sys::ucs_status_t, user_data: *mut c_void) {
    // SAFETY: `user_data` is the box that `start` leaked for this request, and this is its only callback.
    let operation = unsafe { Box::from_raw(user_data.cast::<Operation>()) };
    let result = Status::check(status);
    operation.done.borrow_mut().push(Done { token: operation.token, result });
    // SAFETY: the request is complete and no other reference to it exists.
    unsafe { sys::ucp_request_free(request) };
}
