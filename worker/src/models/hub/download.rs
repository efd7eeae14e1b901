//! Downloads one file into the cache: resumes a broken download, checks the file, and only then gives it its name.

use super::HubId;
use super::api::{RemoteFile, Repository};
use super::client::Client;
use crate::models::{ModelsError, Progress};
use sha2::{Digest, Sha256};
use std::fs::{File, OpenOptions};
use std::io::{Read, Write};
use std::path::Path;
use std::time::Duration;
use ureq::http::Response;
use ureq::http::header::CONTENT_RANGE;

/// Consecutive connections that may break without a single byte received.
const BARREN_MAX: u32 = 5;
/// Pause after the n-th of them: n times this duration.
const PAUSE: Duration = Duration::from_millis(500);
const PIECE_BYTES: usize = 1 << 20;

/// How one connection ended.
enum Outcome {
    Complete,
    /// Worth another try: the connection broke, or the hub is temporarily unavailable.
    Broken(Box<dyn std::error::Error + Send + Sync>),
}

impl Client {
    /// Fetches `name` into `folder`, unless it is there.
    pub(super) fn file(
        &self,
        id: &HubId,
        repository: &Repository,
        name: &str,
        folder: &Path,
        progress: Progress<'_>,
    ) -> Result<(), ModelsError> {
        let target = folder.join(name);
        if target.exists() {
            return Ok(());
        }
        // One that is in a folder of the repository has its folder here too.
        let parent = target.parent().unwrap_or(folder);
        std::fs::create_dir_all(parent).map_err(ModelsError::cache(parent))?;
        let part = folder.join(format!(".{}.part", name.replace('/', "-")));
        let url = self.file_url(id, repository, name);
        let remote = repository.file(name);
        let mut barren = 0;
        loop {
            let before = length(&part);
            match self.connection(id, &url, name, &part, remote, progress)? {
                Outcome::Complete => break,
                Outcome::Broken(_) if length(&part) > before => barren = 0,
                Outcome::Broken(source) => {
                    barren += 1;
                    if barren == BARREN_MAX {
                        return Err(ModelsError::Network { url, source });
                    }
                    std::thread::sleep(PAUSE * barren);
                }
            }
        }
        check(&url, &part, remote)?;
        std::fs::rename(&part, &target).map_err(ModelsError::cache(&target))
    }

    /// Requests the missing part and appends it to `part`, until the body ends or the connection breaks.
    fn connection(
        &self,
        id: &HubId,
        url: &str,
        name: &str,
        part: &Path,
        remote: Option<&RemoteFile>,
        progress: Progress<'_>,
    ) -> Result<Outcome, ModelsError> {
        let have = length(part);
        let size = remote.and_then(|file| file.size);
        if have > 0 && size == Some(have) {
            return Ok(Outcome::Complete);
        }
        let mut answer = match self.get(url, have) {
            Ok(answer) => answer,
            Err(error) => return Ok(Outcome::Broken(error.into())),
        };
        let start = match answer.status().as_u16() {
            200 => 0,
            206 if starts_at(&answer, have) => have,
            // The local part is longer than the hub's file: it is wrong.
            206 | 416 => {
                std::fs::remove_file(part).map_err(ModelsError::cache(part))?;
                return Ok(Outcome::Broken("the file on the hub is another than before".into()));
            }
            429 | 500..=599 => return Ok(Outcome::Broken(format!("the hub answers {}", answer.status()).into())),
            _ => return Err(self.refusal(id, url, &answer)),
        };
        let total = size.or_else(|| answer.body().content_length().map(|rest| start + rest));
        let mut out = OpenOptions::new();
        let out = if start == 0 { out.create(true).write(true).truncate(true) } else { out.append(true) };
        let mut out = out.open(part).map_err(ModelsError::cache(part))?;
        // ureq limits bodies by default; this one is as long as the file.
        let mut body = answer.body_mut().with_config().limit(u64::MAX).reader();
        let (mut buffer, mut done) = (vec![0; PIECE_BYTES], start);
        loop {
            progress(&format!("downloading {name}"), total.map_or(0.0, |total| done as f32 / total.max(1) as f32));
            match body.read(&mut buffer) {
                Ok(0) if total.is_some_and(|total| done < total) => {
                    return Ok(Outcome::Broken(format!("the connection closed at byte {done}").into()));
                }
                Ok(0) => break,
                Ok(count) => {
                    out.write_all(&buffer[..count]).map_err(ModelsError::cache(part))?;
                    done += count as u64;
                }
                Err(error) => return Ok(Outcome::Broken(error.into())),
            }
        }
        out.sync_all().map_err(ModelsError::cache(part))?;
        Ok(Outcome::Complete)
    }
}

fn length(path: &Path) -> u64 {
    std::fs::metadata(path).map_or(0, |file| file.len())
}

/// Whether a partial answer begins at the requested offset.
fn starts_at<T>(answer: &Response<T>, from: u64) -> bool {
    let range = answer.headers().get(CONTENT_RANGE).and_then(|range| range.to_str().ok());
    range.is_some_and(|range| range.starts_with(&format!("bytes {from}-")))
}

/// Checks the size and, if the hub states it, the SHA-256. A wrong file is removed, so that the next run starts over.
fn check(url: &str, part: &Path, remote: Option<&RemoteFile>) -> Result<(), ModelsError> {
    let Some(remote) = remote else { return Ok(()) };
    let damaged = |problem: String| {
        let _ = std::fs::remove_file(part);
        Err(ModelsError::Hub { url: url.to_owned(), problem })
    };
    let have = length(part);
    if let Some(size) = remote.size.filter(|&size| size != have) {
        return damaged(format!("{have} bytes arrived instead of {size}; run again"));
    }
    let Some(lfs) = &remote.lfs else { return Ok(()) };
    let mut hasher = Sha256::new();
    let mut file = File::open(part).map_err(ModelsError::cache(part))?;
    std::io::copy(&mut file, &mut hasher).map_err(ModelsError::cache(part))?;
    let found = hex::encode(hasher.finalize());
    if found != lfs.sha256.to_ascii_lowercase() {
        return damaged(format!("SHA-256 is {found} instead of {}; run again", lfs.sha256));
    }
    Ok(())
}
