//! The UCX context: the available transports, and the memory that they may access.

use super::operation::Token;
use super::status::Status;
use baton_memory::HostPool;
use baton_types::MemoryKind;
use std::cell::Cell;
use std::ffi::CString;
use std::mem::zeroed;
use std::ptr::{null, null_mut};
use std::rc::Rc;
use std::sync::Arc;
use ucx_sys::sys;

/// Version of the library, as `major.minor.patch`.
pub(crate) fn version() -> String {
    let (mut major, mut minor, mut patch) = (0, 0, 0);
    // SAFETY: each pointer is to a number that outlives the call.
    unsafe { sys::ucp_get_version(&mut major, &mut minor, &mut patch) };
    format!("{major}.{minor}.{patch}")
}

pub(crate) struct Context {
    pub(super) handle: sys::ucp_context_h,
    next_token: Cell<u64>,
}

impl Context {
    /// A context with these settings (`TLS`, `KEEPALIVE_INTERVAL`, ... without the `UCX_` prefix) over UCX's own defaults.
    pub(crate) fn new(settings: &[(&str, &str)]) -> Result<Rc<Self>, Status> {
        let mut config = null_mut();
        // SAFETY: null takes UCX's default prefix and no file; `config` receives a new descriptor.
        Status::check(unsafe { sys::ucp_config_read(null(), null(), &mut config) })?;
        let applied = settings.iter().try_for_each(|(name, value)| {
            let name = CString::new(*name).unwrap_or_default();
            let value = CString::new(*value).unwrap_or_default();
            // SAFETY: `config` is live; both strings outlive the call, which copies them.
            Status::check(unsafe { sys::ucp_config_modify(config, name.as_ptr(), value.as_ptr()) })
        });
        let mut handle = null_mut();
        let created = applied.and_then(|()| {
            // SAFETY: all fields of the parameters are numbers, pointers and optional functions, for which zero is a value.
            let mut params: sys::ucp_params_t = unsafe { zeroed() };
            params.field_mask = u64::from(sys::ucp_params_field_UCP_PARAM_FIELD_FEATURES);
            params.features = u64::from(
                sys::ucp_feature_UCP_FEATURE_RMA
                    | sys::ucp_feature_UCP_FEATURE_AM
                    | sys::ucp_feature_UCP_FEATURE_WAKEUP,
            );
            let (major, minor) = (sys::UCP_API_MAJOR, sys::UCP_API_MINOR);
            // SAFETY: parameters and configuration are live over the call; `handle` receives the new context.
            Status::check(unsafe { sys::ucp_init_version(major, minor, &params, config, &mut handle) })
        });
        // SAFETY: `config` came from `ucp_config_read` and is used no more.
        unsafe { sys::ucp_config_release(config) };
        created.map(|()| Rc::new(Self { handle, next_token: Cell::new(0) }))
    }

    /// A token that is unique among the operations of this context's workers.
    pub(crate) fn token(&self) -> Token {
        self.next_token.set(self.next_token.get() + 1);
        Token(self.next_token.get())
    }

    /// Whether this context knows memory of this kind: it can tell that memory from the host's, or allocate it. For CUDA's that takes a UCX
    /// with CUDA and `cuda_copy` among its transports. Whether a NIC can register such memory shows when it does.
    pub(crate) fn supports(&self, kind: MemoryKind) -> bool {
        let memory_type = match kind {
            MemoryKind::Host => sys::ucs_memory_type_UCS_MEMORY_TYPE_HOST,
            MemoryKind::Cuda(_) => sys::ucs_memory_type_UCS_MEMORY_TYPE_CUDA,
            MemoryKind::Remote => return false,
        };
        // SAFETY: all fields of the attributes are numbers, for which zero is a value.
        let mut attributes: sys::ucp_context_attr_t = unsafe { zeroed() };
        attributes.field_mask = u64::from(sys::ucp_context_attr_field_UCP_ATTR_FIELD_MEMORY_TYPES);
        // SAFETY: the context is live; UCX fills the field that the mask names.
        let known = Status::check(unsafe { sys::ucp_context_query(self.handle, &mut attributes) }).is_ok();
        known && attributes.memory_types & (1 << memory_type) != 0
    }

    /// Transports that workers of this context open, e.g. `tcp`. Peers can reach the workers only by these. Sorted.
    pub(crate) fn transports(&self) -> Vec<String> {
        let mut names: Vec<String> = self.resources().into_iter().map(|(transport, _)| transport).collect();
        names.sort();
        names.dedup();
        names
    }

    /// Transports with their devices, e.g. `tcp` and `lo`.
    ///
    /// UCX reports them only in the text of `ucp_context_print_info`, in lines `#  resource 0 :  md 0 dev 0 flags -- tcp/lo`.
    pub(crate) fn resources(&self) -> Vec<(String, String)> {
        let (mut text, mut len) = (null_mut(), 0);
        // SAFETY: `text` and `len` outlive the stream, which is closed below.
        let stream = unsafe { libc::open_memstream(&mut text, &mut len) };
        if stream.is_null() {
            return Vec::new();
        }
        // SAFETY: context and stream are live; the stream is used no more once closed.
        unsafe {
            sys::ucp_context_print_info(self.handle, stream.cast());
            libc::fclose(stream);
        }
        // SAFETY: closing the stream left `len` bytes at `text`, which are ours until freed.
        let info = unsafe { std::slice::from_raw_parts(text.cast::<u8>(), len) }.to_vec();
        // SAFETY: the buffer came from `open_memstream` and is used no more.
        unsafe { libc::free(text.cast()) };
        let info = String::from_utf8_lossy(&info);
        let resources = info.lines().filter(|line| line.trim_start_matches(['#', ' ']).starts_with("resource"));
        let pairs = resources.filter_map(|line| line.rsplit(' ').find(|word| word.contains('/'))?.split_once('/'));
        pairs.map(|(transport, device)| (transport.to_owned(), device.to_owned())).collect()
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: workers and memory handles hold the context, so none of them is left.
        unsafe { sys::ucp_cleanup(self.handle) };
    }
}

/// A region registered with a context: peers with its key may write there.
pub(crate) struct Memory {
    pub(super) handle: sys::ucp_mem_h,
    region: Arc<HostPool>,
    context: Rc<Context>,
}

impl Memory {
    /// Registers all of `region`, and keeps it mapped for as long as the registration lives.
    pub(crate) fn register(context: &Rc<Context>, region: Arc<HostPool>) -> Result<Rc<Self>, Status> {
        // SAFETY: as for the context's parameters.
        let mut params: sys::ucp_mem_map_params_t = unsafe { zeroed() };
        params.field_mask = u64::from(
            sys::ucp_mem_map_params_field_UCP_MEM_MAP_PARAM_FIELD_ADDRESS
                | sys::ucp_mem_map_params_field_UCP_MEM_MAP_PARAM_FIELD_LENGTH,
        );
        params.address = region.base().cast();
        params.length = region.bytes();
        let mut handle = null_mut();
        // SAFETY: the range is the region's mapping, which the new value keeps alive until it is unmapped from the context.
        Status::check(unsafe { sys::ucp_mem_map(context.handle, &params, &mut handle) })?;
        Ok(Rc::new(Self { handle, region, context: context.clone() }))
    }

    /// Size of the registered region in bytes.
    pub(crate) fn len(&self) -> usize {
        self.region.bytes()
    }

    /// Address of a range of the region.
    ///
    /// # Panics
    /// If the range is not within the region.
    pub(super) fn at(&self, offset: usize, len: usize) -> *mut u8 {
        assert!(self.region.contains(&(offset..offset + len)), "{len} bytes at {offset} leave the region");
        self.region.base().wrapping_add(offset)
    }

    /// The key that peers need, packed.
    pub(crate) fn key(&self) -> Result<Vec<u8>, Status> {
        let (mut buffer, mut len) = (null_mut(), 0);
        // SAFETY: context and memory handle are live; `buffer` and `len` receive a buffer of UCX's.
        Status::check(unsafe { sys::ucp_rkey_pack(self.context.handle, self.handle, &mut buffer, &mut len) })?;
        // SAFETY: UCX filled `len` bytes at `buffer`, which is ours until released.
        let key = unsafe { std::slice::from_raw_parts(buffer.cast::<u8>(), len) }.to_vec();
        // SAFETY: the buffer came from `ucp_rkey_pack` and is used no more.
        unsafe { sys::ucp_rkey_buffer_release(buffer) };
        Ok(key)
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: operations that use the handle hold it, so none is left.
        let status = unsafe { sys::ucp_mem_unmap(self.context.handle, self.handle) };
        if let Err(error) = Status::check(status) {
            tracing::error!(%error, "cannot deregister the pool's region");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The vendored UCX has no CUDA. One that has it needs `cuda_copy`, which is not asked for here.
    #[test]
    fn memory_of_the_host_is_all_that_tcp_knows() {
        let context = Context::new(&[("TLS", "tcp"), ("NET_DEVICES", "lo")]).unwrap();
        let kinds = [MemoryKind::Host, MemoryKind::Cuda(0), MemoryKind::Remote];
        assert_eq!(kinds.map(|kind| context.supports(kind)), [true, false, false]);
    }
}
