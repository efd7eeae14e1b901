//! The file of one model's packed weights.
//!
//! | Part | Bytes |
//! |---|---|
//! | mark | 16, with the version of this format |
//! | length of the table, of the file | 8 each, little-endian |
//! | digest of the table | 32 |
//! | table | text: the key, then a line for each weight |
//! | data | of each weight, one after another from a multiple of 64 on |
//!
//! A weight's line has its name, columns, rows and stored format of each part, place, length, and digest. The digest is BLAKE3 over the BLAKE3
//! digests of its pieces of at most 1 MiB, so that threads share the work.

use super::folder::{PrivateFolder, Replacement, touch};
use super::{CacheError, Key};
use crate::device::{PartShape, WeightShape};
use crate::storage::StorageFormat;
use baton_types::Digest;
use parking_lot::Mutex;
use std::collections::HashMap;
use std::fs::File;
use std::io::{BufWriter, Seek as _, SeekFrom, Write as _};
use std::os::unix::fs::FileExt as _;
use std::sync::atomic::{AtomicBool, Ordering};

const MARK: &[u8; 16] = b"baton packed 01\n";
const HEADER: u64 = 16 + 8 + 8 + 32;
const ALIGN: u64 = 64;
/// Largest table: some 200 bytes a weight.
const TABLE_MAX: u64 = 64 << 20;

/// Bytes that one thread reads and checks at a time: they stay in its cache in between.
pub(super) const PIECE: usize = 1 << 20;

/// Runs `task(i)` for each of so many tasks, on one or several threads.
pub(crate) type Run<'a> = &'a dyn Fn(usize, &(dyn Fn(usize) + Sync));

/// A weight of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Entry {
    k: usize,
    parts: Vec<PartShape>,
    at: u64,
    bytes: u64,
    digest: Digest,
}

/// A weight to write.
pub(crate) struct Packed<'a> {
    pub(crate) name: &'a str,
    pub(crate) k: usize,
    pub(crate) parts: &'a [PartShape],
    /// Its packed form, in order.
    pub(crate) bytes: Vec<&'a [u8]>,
}

impl Packed<'_> {
    fn len(&self) -> u64 {
        self.bytes.iter().map(|bytes| bytes.len() as u64).sum()
    }
}

fn digest(of: &[[u8; 32]]) -> Digest {
    Digest(*blake3::hash(of.as_flattened()).as_bytes())
}

/// Where everything goes in a file.
struct Places {
    /// Of each weight.
    data: Vec<u64>,
    /// Size of the file.
    end: u64,
}

impl Places {
    fn of(key: &Key, weights: &[Packed<'_>]) -> Self {
        // The numbers and digests of a line have a fixed width, so its length is known before them.
        let line = |weight: &Packed<'_>| line(weight, 0, Digest([0; 32])).len();
        let table = key.text().len() + weights.iter().map(line).sum::<usize>();
        let mut end = HEADER + table as u64;
        let data = weights.iter().map(|weight| {
            let at = end.next_multiple_of(ALIGN);
            end = at + weight.len();
            at
        });
        Self { data: data.collect(), end }
    }
}

/// Size of the file of these weights.
pub(super) fn size(key: &Key, weights: &[Packed<'_>]) -> u64 {
    Places::of(key, weights).end
}

/// A file that takes the place of `key`'s once it is complete. Others see from the start how much room it takes.
pub(super) fn begin<'a>(folder: &'a PrivateFolder, key: &Key, bytes: u64) -> Result<Replacement<'a>, CacheError> {
    let mut replacement = folder.replace(&key.file_name())?;
    let failed = replacement.failed();
    replacement.file().set_len(bytes).map_err(failed)?;
    Ok(replacement)
}

/// Writes the file of `key`.
pub(super) fn write(folder: &PrivateFolder, key: &Key, weights: &[Packed<'_>]) -> Result<(), CacheError> {
    let (places, mut table) = (Places::of(key, weights), key.text());
    for (weight, at) in weights.iter().zip(&places.data) {
        let pieces = weight.bytes.iter().flat_map(|bytes| bytes.chunks(PIECE));
        let digests: Vec<_> = pieces.map(|piece| *blake3::hash(piece).as_bytes()).collect();
        table.push_str(&line(weight, *at, digest(&digests)));
    }
    let mut replacement = begin(folder, key, places.end)?;
    let failed = replacement.failed();
    let mut out = BufWriter::with_capacity(PIECE, replacement.file());
    let mut put = || {
        out.write_all(MARK)?;
        out.write_all(&(table.len() as u64).to_le_bytes())?;
        out.write_all(&places.end.to_le_bytes())?;
        out.write_all(blake3::hash(table.as_bytes()).as_bytes())?;
        out.write_all(table.as_bytes())?;
        for (weight, at) in weights.iter().zip(&places.data) {
            out.seek(SeekFrom::Start(*at))?;
            weight.bytes.iter().try_for_each(|bytes| out.write_all(bytes))?;
        }
        out.flush()
    };
    put().map_err(&failed)?;
    drop(out);
    replacement.finish()
}

fn line(weight: &Packed<'_>, at: u64, digest: Digest) -> String {
    let parts: Vec<_> = weight.parts.iter().map(|part| format!("{}:{}", part.rows, part.format.name())).collect();
    let (name, k, bytes) = (weight.name, weight.k, weight.len());
    format!("{name}\t{k}\t{}\t{at:016x}\t{bytes:016x}\t{digest}\n", parts.join(","))
}

fn parse(line: &str) -> Option<(String, Entry)> {
    let fields: Vec<&str> = line.split('\t').collect();
    let [name, k, parts, at, bytes, digest] = fields[..] else { return None };
    let part = |text: &str| {
        let (rows, format) = text.split_once(':')?;
        Some(PartShape { rows: rows.parse().ok()?, format: StorageFormat::named(format)? })
    };
    let entry = Entry {
        k: k.parse().ok()?,
        parts: parts.split(',').map(part).collect::<Option<_>>()?,
        at: u64::from_str_radix(at, 16).ok()?,
        bytes: u64::from_str_radix(bytes, 16).ok()?,
        digest: Digest::from_hex(digest)?,
    };
    Some((name.to_owned(), entry))
}

/// A file whose table is right. The data is checked when it is read.
#[derive(Debug)]
pub(super) struct Reader {
    file: File,
    entries: HashMap<String, Entry>,
}

impl Reader {
    /// Opens the file of `key`; `None` if there is none.
    pub(super) fn open(folder: &PrivateFolder, key: &Key) -> Result<Option<Self>, CacheError> {
        let (name, path) = (key.file_name(), folder.path().join(key.file_name()));
        let Some(file) = folder.read(&name)? else { return Ok(None) };
        let damaged = |what: &str| CacheError::refused(&path, what);
        let len = file.metadata().map_err(CacheError::io(&path))?.len();
        let mut header = [0; HEADER as usize];
        file.read_exact_at(&mut header, 0).map_err(CacheError::io(&path))?;
        let number = |at: usize| u64::from_le_bytes(std::array::from_fn(|i| header[at + i]));
        let (table, whole) = (number(16), number(24));
        if header[..16] != *MARK || whole != len || table > TABLE_MAX.min(len - HEADER) {
            return Err(damaged("its header is damaged, or it is not whole"));
        }
        let mut text = vec![0; table as usize];
        file.read_exact_at(&mut text, HEADER).map_err(CacheError::io(&path))?;
        if header[32..] != *blake3::hash(&text).as_bytes() {
            return Err(damaged("its table is damaged"));
        }
        let text = String::from_utf8(text).ok();
        let lines = text.as_deref().and_then(|text| text.strip_prefix(key.text().as_str()));
        let entries = lines.and_then(|lines| lines.lines().map(parse).collect::<Option<HashMap<_, _>>>());
        let entries = entries.ok_or_else(|| damaged("its table is of other weights"))?;
        touch(&file);
        Ok(Some(Self { file, entries }))
    }

    /// The parts of a weight as they were stored, if it is in the file and of this shape.
    pub(super) fn parts(&self, shape: &WeightShape<'_>) -> Option<&[PartShape]> {
        let entry = self.entries.get(shape.name)?;
        let rows = entry.parts.iter().map(|part| part.rows);
        (entry.k == shape.k && rows.eq(shape.rows.iter().copied())).then_some(&entry.parts)
    }

    /// Reads a weight's bytes to `into`. They are undefined if that fails.
    pub(super) fn read(&self, name: &str, into: Vec<&mut [u8]>, run: Run<'_>) -> Result<(), &'static str> {
        let entry = self.entries.get(name).ok_or("it is not there")?;
        if into.iter().map(|bytes| bytes.len() as u64).sum::<u64>() != entry.bytes {
            return Err("its size is another");
        }
        let mut at = entry.at;
        let mut tasks = Vec::new();
        for piece in into.into_iter().flat_map(|bytes| bytes.chunks_mut(PIECE)) {
            let next = at + piece.len() as u64;
            tasks.push(Mutex::new((at, piece, [0; 32])));
            at = next;
        }
        let whole = AtomicBool::new(true);
        run(tasks.len(), &|i| {
            let (at, piece, digest) = &mut *tasks[i].lock();
            match self.file.read_exact_at(piece, *at) {
                Ok(()) => *digest = *blake3::hash(piece).as_bytes(),
                Err(_) => whole.store(false, Ordering::Relaxed),
            }
        });
        let digests: Vec<_> = tasks.into_iter().map(|task| task.into_inner().2).collect();
        match whole.into_inner() {
            true if digest(&digests) == entry.digest => Ok(()),
            true => Err("its digest is another"),
            false => Err("it cannot be read"),
        }
    }
}
