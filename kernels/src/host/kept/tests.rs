//! Whatever happens to the files: the packed bytes are right, and no load fails.

use crate::cpu::{CpuConfig, CpuDevice, SimdLevel};
use crate::device::{Device as _, Role, StoredRows, WeightShape, WeightSpec};
use crate::host::HostKernels as _;
use crate::numerics::Numerics;
use crate::packed::{PackedCache, PrivateFolder};
use crate::quantize::halves;
use crate::storage::StorageFormat;
use baton_skips::{Need, skipped};
use baton_types::{Digest, Dtype};
use std::fs::{File, Permissions};
use std::os::unix::fs::{FileExt as _, PermissionsExt as _, chown, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Barrier;
use std::time::{Duration, Instant, SystemTime};

const NUMERICS: [Numerics; 5] = [
    Numerics::F32Fma { weights: Dtype::F32 },
    Numerics::F32Fma { weights: Dtype::F16 },
    Numerics::F32Fma { weights: Dtype::Bf16 },
    Numerics::Bf16x32,
    Numerics::I8x32,
];

const MODEL: Digest = Digest([7; 32]);

/// A model's matrices: name, role, columns, and the rows and format of each part.
type Shape = (&'static str, Role, usize, &'static [(usize, StorageFormat)]);

const SHAPES: [Shape; 4] = [
    ("embedding", Role::Embedding, 512, &[(1500, StorageFormat::Q8_0)]),
    ("qkv", Role::Qkv, 512, &[(40, StorageFormat::Q4K), (7, StorageFormat::F16), (7, StorageFormat::Q6K)]),
    ("gate up", Role::GateUp, 512, &[(33, StorageFormat::Q5K), (33, StorageFormat::Q4_0)]),
    ("down", Role::Down, 96, &[(512, StorageFormat::Q4_1)]),
];

/// Rows whose scales are numbers.
fn stored(rows: usize, k: usize, format: StorageFormat) -> Vec<u8> {
    let (elements, size) = format.block();
    let mut seed = rows as u32;
    let mut bytes = Vec::new();
    for _ in 0..rows * k / elements {
        let block = bytes.len();
        bytes.extend((0..size).map(|_| {
            seed = seed.wrapping_mul(0x9e37_79b1).rotate_left(13).wrapping_add(0x85eb_ca77);
            (seed >> 24) as u8
        }));
        halves(format).iter().for_each(|at| bytes[block + at + 1] &= 0x3f);
    }
    bytes
}

/// A folder, and what a model's packed weights should be.
struct World {
    root: tempfile::TempDir,
    numerics: Numerics,
    simd: SimdLevel,
}

impl World {
    fn new(numerics: Numerics) -> Self {
        Self { root: tempfile::tempdir().unwrap(), numerics, simd: SimdLevel::detect().unwrap() }
    }

    fn folder(&self) -> PathBuf {
        self.root.path().join("packed")
    }

    fn cache(&self) -> PackedCache {
        PackedCache::new(PrivateFolder::open(&self.folder()).unwrap(), 1 << 30, Duration::from_secs(30))
    }

    /// The file that a device wrote.
    fn file(&self) -> PathBuf {
        let mut files = std::fs::read_dir(self.folder()).unwrap().map(|entry| entry.unwrap().path());
        files.find(|path| path.extension().is_some_and(|e| e == "packed")).unwrap()
    }

    fn start(&self, cache: &PackedCache, model: Digest) -> Started {
        let config = CpuConfig { threads: 2, simd: Some(self.simd), numerics: self.numerics };
        Started::load(&CpuDevice::cached(config, cache.clone(), model).unwrap(), cache)
    }

    /// What is packed without a cache.
    fn fresh(&self) -> Vec<Vec<u8>> {
        let config = CpuConfig { threads: 1, simd: Some(self.simd), numerics: self.numerics };
        Started::load(&CpuDevice::new(config).unwrap(), &self.cache()).bytes
    }
}

/// A start of a device.
#[derive(Debug, PartialEq, Eq)]
struct Started {
    /// Weights that it had to pack.
    packed: Vec<&'static str>,
    bytes: Vec<Vec<u8>>,
}

impl Started {
    fn load(device: &CpuDevice, cache: &PackedCache) -> Self {
        let (mut packed, mut bytes) = (Vec::new(), Vec::new());
        for (name, role, k, parts) in SHAPES {
            let rows: Vec<usize> = parts.iter().map(|part| part.0).collect();
            let cached = device.cached(&WeightShape { name, role, k, rows: &rows });
            let weight = cached.unwrap_or_else(|| {
                packed.push(name);
                let stored: Vec<_> = parts.iter().map(|(rows, format)| stored(*rows, k, *format)).collect();
                let parts: Vec<_> = parts
                    .iter()
                    .zip(&stored)
                    .map(|(&(rows, format), bytes)| StoredRows { rows, format, bytes })
                    .collect();
                device.load(&WeightSpec { name, role, k, parts: &parts }).unwrap()
            });
            assert_eq!((weight.n, weight.k), (rows.iter().sum(), k));
            let loaded = device.shared.matrix(weight, parts.len()).unwrap();
            bytes.push(device.shared.kernels.packed(loaded.matrix()).concat());
        }
        if let Some(kept) = &device.kept {
            kept.save(&device.shared);
        }
        assert!(cache.settle(Instant::now() + Duration::from_secs(60)));
        Self { packed, bytes }
    }

    fn names(&self) -> usize {
        self.packed.len()
    }
}

#[test]
fn quantized_weights_take_little_more_than_in_the_file() {
    let classes = [Numerics::Bf16x32, Numerics::I8x32];
    for (numerics, format) in classes.into_iter().flat_map(|n| StorageFormat::QUANTIZED.map(|f| (n, f))) {
        let device = CpuDevice::new(CpuConfig { threads: 1, simd: None, numerics }).unwrap();
        let bytes = stored(256, 512, format);
        let parts = [StoredRows { rows: 256, format, bytes: &bytes }];
        let weight = device.load(&WeightSpec { name: "down", role: Role::Down, k: 512, parts: &parts }).unwrap();
        let matrix = device.shared.matrix(weight, 1).unwrap();
        let packed = device.shared.kernels.packed(matrix.matrix()).concat().len();
        assert!(packed <= bytes.len() * 21 / 20, "{numerics:?} {format:?}: {packed} bytes of {}", bytes.len());
    }
}

#[test]
fn what_is_kept_is_what_is_packed() {
    for (numerics, simd) in NUMERICS.into_iter().flat_map(|n| SimdLevel::ALL.map(|simd| (n, simd))) {
        if !simd.available() {
            continue; // The layout is tested with `AmxScalar`.
        }
        let world = World { simd, ..World::new(numerics) };
        let (fresh, cache) = (world.fresh(), world.cache());
        let first = world.start(&cache, MODEL);
        assert_eq!((first.names(), &first.bytes), (SHAPES.len(), &fresh), "{numerics} {simd:?}");
        let second = world.start(&world.cache(), MODEL);
        assert_eq!((second.names(), &second.bytes), (0, &fresh), "{numerics} {simd:?}");
        let mode = |path: &Path| path.metadata().unwrap().permissions().mode() & 0o777;
        assert_eq!((mode(&world.folder()), mode(&world.file())), (0o700, 0o600));
    }
}

#[test]
fn a_start_that_reads_a_file_counts_as_its_use() {
    let world = World::new(Numerics::Bf16x32);
    let cache = world.cache();
    world.start(&cache, MODEL);
    let long_ago = SystemTime::now() - Duration::from_secs(3600);
    File::options().write(true).open(world.file()).unwrap().set_modified(long_ago).unwrap();
    assert_eq!(world.start(&cache, MODEL).names(), 0);
    let used = world.file().metadata().unwrap().modified().unwrap();
    assert!(used > long_ago + Duration::from_secs(1800), "it would be the first to make room for others");
}

#[test]
fn the_layout_is_the_recorded_one() {
    // Where this fails, the packed bytes changed: increase PACKING_REVISION and record the digests.
    let digest = |simd| {
        let mut hasher = blake3::Hasher::new();
        for numerics in NUMERICS {
            for bytes in (World { simd, ..World::new(numerics) }).fresh() {
                hasher.update(&bytes);
            }
        }
        hasher.finalize().to_hex()[..32].to_owned()
    };
    let recorded = ["ba08e812fccc4c8e5a0ba04c04e5d729", "8040b046658778a442c28c62facef057"];
    assert_eq!([SimdLevel::Portable, SimdLevel::AmxScalar].map(digest), recorded);
}

#[test]
fn other_models_classes_and_layouts_are_kept_apart() {
    let world = World { simd: SimdLevel::Portable, ..World::new(Numerics::Bf16x32) };
    let cache = world.cache();
    assert_eq!(world.start(&cache, MODEL).names(), SHAPES.len());
    assert_eq!(world.start(&cache, Digest([8; 32])).names(), SHAPES.len(), "another model");
    for numerics in NUMERICS {
        let other = World { root: tempfile::tempdir().unwrap(), numerics, simd: SimdLevel::AmxScalar };
        assert_eq!(other.start(&cache, MODEL).names(), SHAPES.len(), "{numerics}, another layout");
        assert_eq!(other.start(&cache, MODEL).names(), 0);
    }
    assert_eq!(world.start(&cache, MODEL).names(), 0, "still there");
}

/// Each byte of header and table, and bytes of all that follows.
fn positions(file: &[u8]) -> Vec<usize> {
    let table = u64::from_le_bytes(file[16..24].try_into().unwrap()) as usize;
    (0..64 + table)
        .step_by(3)
        .chain((64 + table..file.len()).step_by(file.len() / 23))
        .chain([file.len() - 1])
        .collect()
}

#[test]
fn a_changed_byte_is_packed_again() {
    let world = World::new(Numerics::I8x32);
    let (fresh, cache) = (world.fresh(), world.cache());
    world.start(&cache, MODEL);
    let (path, whole) = (world.file(), std::fs::read(world.file()).unwrap());
    let (mut all, mut one, mut none) = (0, 0, 0);
    for at in positions(&whole) {
        let file = File::options().write(true).open(&path).unwrap();
        file.write_all_at(&[whole[at] ^ 0x10], at as u64).unwrap();
        let started = world.start(&cache, MODEL);
        assert_eq!(started.bytes, fresh, "byte {at}");
        match started.names() {
            0 => none += 1,
            1 => one += 1,
            _ => all += 1,
        }
        if started.names() == 0 {
            // Between two weights: nothing reads it.
            file.write_all_at(&[whole[at]], at as u64).unwrap();
        }
        assert!(std::fs::read(&path).unwrap() == whole, "byte {at}: the file is whole again");
    }
    assert!(all > 100 && one > 15 && none <= 1, "{all} {one} {none}");
}

#[test]
fn a_file_that_is_not_whole_is_packed_again() {
    let world = World::new(Numerics::Bf16x32);
    let (fresh, cache) = (world.fresh(), world.cache());
    world.start(&cache, MODEL);
    let (path, whole) = (world.file(), std::fs::read(world.file()).unwrap());
    let cuts = [0, 1, 63, 64, 100, 4096, whole.len() / 2, whole.len() - 1];
    let longer = [&whole[..], &[0]].concat();
    for content in cuts.iter().map(|len| &whole[..*len]).chain([&longer[..], &whole[1..], &[0xff; 200]]) {
        std::fs::write(&path, content).unwrap();
        let started = world.start(&cache, MODEL);
        assert_eq!((started.names(), started.bytes == fresh), (SHAPES.len(), true), "{} bytes", content.len());
        assert!(std::fs::read(&path).unwrap() == whole);
    }
    // Lengths that lie.
    for (at, value) in [(16, u64::MAX), (16, 1 << 40), (24, u64::MAX), (24, 0)] {
        let mut content = whole.clone();
        content[at..at + 8].copy_from_slice(&value.to_le_bytes());
        std::fs::write(&path, content).unwrap();
        assert_eq!(world.start(&cache, MODEL).bytes, fresh, "{at} {value}");
    }
}

#[test]
fn a_file_of_others_is_not_read() {
    type Change = fn(&Path);
    let changes: [(&str, Change); 5] = [
        ("others may read it", |path| std::fs::set_permissions(path, Permissions::from_mode(0o644)).unwrap()),
        ("its group may write to it", |path| std::fs::set_permissions(path, Permissions::from_mode(0o620)).unwrap()),
        ("a symbolic link", |path| {
            let moved = path.with_extension("moved");
            std::fs::rename(path, &moved).unwrap();
            symlink(moved, path).unwrap();
        }),
        ("a FIFO", |path| {
            std::fs::remove_file(path).unwrap();
            assert!(Command::new("mkfifo").args(["-m", "600"]).arg(path).status().unwrap().success());
        }),
        ("a folder", |path| {
            std::fs::remove_file(path).unwrap();
            std::fs::create_dir(path).unwrap();
        }),
    ];
    let of_another: (&str, Change) = ("of another user", |path| {
        if let Err(error) = chown(path, Some(65_534), None) {
            skipped(Need::Namespaces, "a file of another user", error);
            std::fs::remove_file(path).unwrap();
        }
    });
    for (what, change) in changes.into_iter().chain([of_another]) {
        let world = World::new(Numerics::Bf16x32);
        let (fresh, cache) = (world.fresh(), world.cache());
        world.start(&cache, MODEL);
        let path = world.file();
        change(&path);
        let started = world.start(&cache, MODEL);
        assert_eq!((started.names(), started.bytes == fresh), (SHAPES.len(), true), "{what}");
        let again = world.start(&cache, MODEL);
        assert_eq!((again.names() == 0, again.bytes == fresh), (!path.is_dir(), true), "{what}: replaced");
    }
}

#[test]
fn two_that_start_at_once_pack_once() {
    for wait_max in [Duration::from_secs(60), Duration::ZERO] {
        let world = World::new(Numerics::Bf16x32);
        let (fresh, barrier) = (world.fresh(), Barrier::new(3));
        let start = || {
            // As two processes: they share the folder alone.
            let cache = PackedCache::new(PrivateFolder::open(&world.folder()).unwrap(), 1 << 30, wait_max);
            barrier.wait();
            world.start(&cache, MODEL)
        };
        let all: Vec<_> = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..3).map(|_| scope.spawn(start)).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        assert!(all.iter().all(|started| started.bytes == fresh));
        let packed: usize = all.iter().map(Started::names).sum();
        assert!(packed == SHAPES.len() || wait_max.is_zero(), "{packed} weights were packed");
        assert_eq!(world.start(&world.cache(), MODEL).names(), 0, "the file is whole");
    }
}

#[test]
fn what_a_killed_writer_left_is_removed() {
    let world = World::new(Numerics::Bf16x32);
    let cache = world.cache();
    let left = world.folder().join("0123.packed.77-0.tmp");
    std::fs::write(&left, [0; 5000]).unwrap();
    std::fs::set_permissions(&left, Permissions::from_mode(0o600)).unwrap();
    assert_eq!(world.start(&cache, MODEL).names(), SHAPES.len());
    assert!(!left.exists());
    assert_eq!(world.start(&cache, MODEL).names(), 0);
}

#[test]
fn a_disk_that_is_full_or_read_only_is_no_reason_to_fail() {
    let world = World::new(Numerics::Bf16x32);
    let (fresh, mounted) = (world.fresh(), world.root.path().join("disk"));
    std::fs::create_dir(&mounted).unwrap();
    let mount =
        |options: &str| Command::new("mount").args(["-t", "tmpfs", "-o", options, "tmpfs"]).arg(&mounted).output();
    match mount("size=256k") {
        Ok(output) if output.status.success() => {}
        other => return skipped(Need::Namespaces, "full and read-only disks", format!("mount: {other:?}")),
    }
    let _unmount = Unmount(&mounted);
    let cache = || PackedCache::new(PrivateFolder::open(&mounted.join("packed")).unwrap(), 1 << 30, Duration::ZERO);
    for _ in 0..2 {
        let started = world.start(&cache(), MODEL);
        assert_eq!((started.names(), started.bytes == fresh), (SHAPES.len(), true), "full");
    }
    let left: Vec<_> = cache().folder().list().unwrap().into_iter().filter(|file| file.bytes > 0).collect();
    assert_eq!(left, [], "a full disk is not left full");
    mount("remount,size=64m").unwrap();
    world.start(&cache(), MODEL);
    mount("remount,ro").unwrap();
    let started = world.start(&cache(), MODEL);
    assert_eq!((started.names(), started.bytes == fresh), (0, true), "a read-only disk that holds the weights");
    let started = world.start(&cache(), Digest([8; 32]));
    assert_eq!((started.names(), started.bytes == fresh), (SHAPES.len(), true), "one that does not");
}

struct Unmount<'a>(&'a Path);

impl Drop for Unmount<'_> {
    fn drop(&mut self) {
        Command::new("umount").arg("-l").arg(self.0).status().ok();
    }
}
