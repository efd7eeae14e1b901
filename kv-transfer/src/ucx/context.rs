//! The UCX context: the available transports, and the memory that they may access.

use super::operation::Token;
use super::status::Status;
use baton_memory::PoolMemory;
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
        let Some(memory_type) = memory_type(kind) else { return false };
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
    pub(crate) fn resources(&self) -> Vec<(String, String)> {
        let resources = self.domains().into_iter().flat_map(|domain| domain.resources);
        resources.map(|resource| (resource.transport, resource.device)).collect()
    }

    /// Memory domains, by their number: what registers memory, with the transports that use it.
    ///
    /// UCX reports them only in the text of `ucp_context_print_info`, in lines `#  md 0  :  component 0  tcp` and
    /// `#  resource 0 :  md 0 dev 0 flags -- tcp/lo`.
    pub(crate) fn domains(&self) -> Vec<Domain> {
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
        domains(&String::from_utf8_lossy(&info))
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: workers and memory handles hold the context, so none of them is left.
        unsafe { sys::ucp_cleanup(self.handle) };
    }
}

/// UCX's type of memory of this kind; `None` if it has none.
fn memory_type(kind: MemoryKind) -> Option<sys::ucs_memory_type_t> {
    match kind {
        MemoryKind::Host => Some(sys::ucs_memory_type_UCS_MEMORY_TYPE_HOST),
        MemoryKind::Cuda(_) => Some(sys::ucs_memory_type_UCS_MEMORY_TYPE_CUDA),
        MemoryKind::Remote => None,
    }
}

/// A memory domain of a context: what registers memory for some of its transports.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Domain {
    /// UCX's name, such as `mlx5_0`.
    pub(crate) name: String,
    pub(crate) resources: Vec<Resource>,
}

/// A transport on a device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Resource {
    pub(crate) transport: String,
    pub(crate) device: String,
}

/// Domains in the text of a context.
fn domains(info: &str) -> Vec<Domain> {
    let mut domains = Vec::<Domain>::new();
    for line in info.lines() {
        let words: Vec<&str> = line.trim_start_matches(['#', ' ']).split_whitespace().collect();
        match words[..] {
            ["md", _, ":", "component", _, name] => {
                domains.push(Domain { name: name.to_owned(), resources: Vec::new() })
            }
            ["resource", _, ":", "md", domain, .., resource] => {
                let domain = domain.parse().ok().and_then(|number: usize| domains.get_mut(number));
                let resource = resource
                    .split_once('/')
                    .map(|(transport, device)| Resource { transport: transport.to_owned(), device: device.to_owned() });
                if let Some(domain) = domain {
                    domain.resources.extend(resource);
                }
            }
            _ => {}
        }
    }
    domains
}

/// The beginning of a packed key, the same in all versions of UCX that speak with each other (`ucp_rkey_pack_memh`): a map of the owner's
/// memory domains that took the memory, and the memory's type.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct KeyHead {
    domains: u64,
    memory_type: u8,
}

impl KeyHead {
    /// Bytes of it.
    pub(super) const BYTES: usize = 9;

    /// `None` if the key is too short for one.
    pub(crate) fn of(key: &[u8]) -> Option<Self> {
        let (domains, rest) = key.split_first_chunk::<8>()?;
        Some(Self { domains: u64::from_ne_bytes(*domains), memory_type: *rest.first()? })
    }

    /// Whether the domain with this number took the memory.
    pub(crate) fn took(self, domain: usize) -> bool {
        u32::try_from(domain).ok().and_then(|domain| self.domains.checked_shr(domain)).is_some_and(|map| map & 1 == 1)
    }

    /// Whether the memory is the host's.
    pub(crate) fn is_of_host(self) -> bool {
        u32::from(self.memory_type) == sys::ucs_memory_type_UCS_MEMORY_TYPE_HOST
    }
}

/// A pool registered with a context: peers with its key may write there.
pub(crate) struct Memory {
    pub(super) handle: sys::ucp_mem_h,
    /// The type that it was registered with. Operations name it, so that UCX need not look for it.
    pub(super) memory_type: sys::ucs_memory_type_t,
    pool: Arc<dyn PoolMemory>,
    address: u64,
    context: Rc<Context>,
}

impl Memory {
    /// Registers all of `pool`, and keeps it for as long as the registration lives. UCX succeeds where no domain takes the memory: see
    /// [`KeyHead::took`].
    ///
    /// # Errors
    /// UCX's, and [`Status::INVALID_PARAM`] for a pool that no NIC can reach.
    pub(crate) fn register(context: &Rc<Context>, pool: Arc<dyn PoolMemory>) -> Result<Rc<Self>, Status> {
        let (Some(address), Some(memory_type)) = (pool.dma_address(), memory_type(pool.kind())) else {
            return Err(Status::INVALID_PARAM);
        };
        // SAFETY: as for the context's parameters.
        let mut params: sys::ucp_mem_map_params_t = unsafe { zeroed() };
        params.field_mask = u64::from(
            sys::ucp_mem_map_params_field_UCP_MEM_MAP_PARAM_FIELD_ADDRESS
                | sys::ucp_mem_map_params_field_UCP_MEM_MAP_PARAM_FIELD_LENGTH
                | sys::ucp_mem_map_params_field_UCP_MEM_MAP_PARAM_FIELD_MEMORY_TYPE,
        );
        params.address = std::ptr::with_exposed_provenance_mut(address as usize);
        params.length = pool.bytes();
        params.memory_type = memory_type;
        let mut handle = null_mut();
        // SAFETY: the range is the pool's memory, which the new value keeps alive until it is unmapped from the context. UCX follows the
        // address only if the memory is the host's.
        Status::check(unsafe { sys::ucp_mem_map(context.handle, &params, &mut handle) })?;
        Ok(Rc::new(Self { handle, memory_type, pool, address, context: context.clone() }))
    }

    /// Size of the registered region in bytes.
    pub(crate) fn len(&self) -> usize {
        self.pool.bytes()
    }

    /// Where peers with its key reach it.
    pub(crate) fn address(&self) -> u64 {
        self.address
    }

    /// Address of a range of the region. The host follows it only where the memory is its own.
    ///
    /// # Panics
    /// If the range is not within the region.
    pub(super) fn at(&self, offset: usize, len: usize) -> *mut u8 {
        let is_inside = offset.checked_add(len).is_some_and(|end| end <= self.len());
        assert!(is_inside, "{len} bytes at {offset} leave the region");
        std::ptr::with_exposed_provenance_mut(self.address as usize + offset)
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
    use baton_memory::{HostPool, MemoryError, NoRoom, Pending, RemoteConfig, RemotePool, Rows};
    use std::any::Any;

    /// The vendored UCX has no CUDA. One that has it needs `cuda_copy`, which is not asked for here.
    fn tcp() -> Rc<Context> {
        Context::new(&[("TLS", "tcp"), ("NET_DEVICES", "lo")]).unwrap()
    }

    #[test]
    fn memory_of_the_host_is_all_that_tcp_knows() {
        let context = tcp();
        let kinds = [MemoryKind::Host, MemoryKind::Cuda(0), MemoryKind::Remote];
        assert_eq!(kinds.map(|kind| context.supports(kind)), [true, false, false]);
    }

    #[test]
    fn domains_are_read_from_the_text_of_a_context() {
        let text = "#\n# UCP context\n#\n#     component 0  :  tcp\n#     component 1  :  ib\n#\n\
            #            md 0  :  component 0  tcp \n#            md 1  :  component 1  mlx5_0 \n#            md 2  :  component 1  mlx5_1 \n\
            #\n#      resource 0  :  md 0  dev 0  flags -- tcp/eth0\n#      resource 1  :  md 2  dev 1  flags -- rc_mlx5/mlx5_1:1\n\
            #      resource 2  :  md 2  dev 1  flags a- ud_mlx5/mlx5_1:1\n#      resource 3  :  md 7  dev 1  flags -- odd/one\n#\n";
        let found: Vec<_> = domains(text)
            .into_iter()
            .map(|domain| {
                let of = |resource: &Resource| format!("{} on {}", resource.transport, resource.device);
                (domain.name, domain.resources.iter().map(of).collect::<Vec<_>>().join(", "))
            })
            .collect();
        let expected = [("tcp", "tcp on eth0"), ("mlx5_0", ""), ("mlx5_1", "rc_mlx5 on mlx5_1:1, ud_mlx5 on mlx5_1:1")];
        assert_eq!(found, expected.map(|(name, resources)| (name.to_owned(), resources.to_owned())));
    }

    #[test]
    fn a_key_begins_with_the_domains_that_took_the_memory() {
        let head = |domains: u64, memory_type| {
            KeyHead::of(&[&domains.to_ne_bytes()[..], &[memory_type], b"what follows"].concat()).unwrap()
        };
        let some = head(0b101, 1);
        assert_eq!(
            [0, 1, 2, 3, 63, 64, 1 << 40].map(|domain| some.took(domain)),
            [true, false, true, false, false, false, false]
        );
        assert!(head(1 << 63, 1).took(63) && !some.is_of_host() && head(0, 0).is_of_host());
        assert_eq!((KeyHead::of(&[0; 8]), KeyHead::of(&[0; 9]).is_some()), (None, true));
    }

    /// UCX's own keys, over each lane that needs no device.
    #[test]
    fn keys_of_the_library_have_this_beginning() {
        // Whether the domain takes memory that UCX did not allocate: not that of `posix`, `sysv` and `tcp`.
        for (tls, takes) in [("tcp", false), ("self", true), ("posix", false), ("sysv", false)] {
            let context = Context::new(&[("TLS", tls), ("NET_DEVICES", "lo")]).unwrap();
            let pool = HostPool::new(1 << 16).unwrap();
            let (memory, domains) = (Memory::register(&context, pool.clone()).unwrap(), context.domains());
            let head = KeyHead::of(&memory.key().unwrap()).unwrap();
            assert!(head.is_of_host() && memory.address() == pool.base() as u64, "{tls}");
            let took: Vec<_> =
                domains.iter().enumerate().filter(|(at, _)| head.took(*at)).map(|(_, d)| &*d.name).collect();
            assert_eq!(!took.is_empty(), takes, "{tls}: {took:?} of {domains:?}");
            assert!((domains.len()..64).all(|at| !head.took(at)), "{tls}");
        }
    }

    /// Memory at an address that is none of this process.
    #[derive(Debug)]
    struct FarAway;

    impl PoolMemory for FarAway {
        fn kind(&self) -> MemoryKind {
            MemoryKind::Cuda(0)
        }
        fn bytes(&self) -> usize {
            1 << 20
        }
        fn dma_address(&self) -> Option<u64> {
            Some(0x7a00_0000_0000_0000)
        }
        fn try_read(&self, _: Rows, into: Vec<u8>) -> Result<Pending<Vec<u8>>, NoRoom<Vec<u8>>> {
            Err(NoRoom { running: 0, buffer: into })
        }
        fn try_write(&self, _: Rows, data: Vec<u8>) -> Result<Pending<Vec<u8>>, NoRoom<Vec<u8>>> {
            Err(NoRoom { running: 0, buffer: data })
        }
        fn copy(&self, _: Rows, _: Rows) -> Pending<()> {
            Pending::ended(Err(MemoryError::Late))
        }
        fn try_checksum(&self, rows: Vec<Rows>) -> Result<Pending<Vec<u64>>, NoRoom<Vec<Rows>>> {
            Err(NoRoom { running: 0, buffer: rows })
        }
        fn into_any(self: Arc<Self>) -> Arc<dyn Any + Send + Sync> {
            self
        }
    }

    /// Nobody follows its address. Without a domain for it, UCX either fails or registers it nowhere.
    #[test]
    fn memory_of_a_device_is_taken_by_no_domain_of_the_host() {
        let context = Context::new(&[("TLS", "tcp,self"), ("NET_DEVICES", "lo")]).unwrap();
        let pool = Arc::new(FarAway);
        if let Ok(memory) = Memory::register(&context, pool.clone()) {
            let head = KeyHead::of(&memory.key().unwrap()).unwrap();
            assert!(!head.is_of_host() && (0..64).all(|domain| !head.took(domain)), "{head:?}");
        }
        assert_eq!(Arc::strong_count(&pool), 1);
    }

    #[test]
    fn a_registration_keeps_its_pool() {
        let (context, pool) = (tcp(), HostPool::new(1 << 16).unwrap());
        let memory = Memory::register(&context, pool.clone()).unwrap();
        assert_eq!((Arc::strong_count(&pool), memory.len()), (2, 1 << 16));
        drop(memory);
        assert_eq!(Arc::strong_count(&pool), 1);
    }

    #[test]
    fn memory_without_an_address_is_not_registered() {
        let pool = RemotePool::new(1 << 16, RemoteConfig::default()).unwrap();
        assert_eq!(Memory::register(&tcp(), pool).err(), Some(Status::INVALID_PARAM));
    }
}
