//! The memory that prompts take while they are tokenized, over all prompts.
//!
//! Prompts get their shares in the order of their calls, so none waits for later ones. Long prompts first wait for each
//! other: they have three quarters of the memory together. So a short prompt never waits until a long one is tokenized,
//! only until other short ones are, which takes milliseconds. Without long prompts, short ones have all of the memory.

use std::sync::Arc;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// Most long prompts at once: others find a thread.
const LONG_AT_ONCE: u32 = 3;
/// A prompt is long if it takes more than this part of the memory. Of 384 MiB these are 24: some 600 KB of text on the
/// fast path, and 200 KB by the library.
const LONG_PART: u32 = 16;
const KIB: u64 = 1 << 10;

#[derive(Debug)]
pub(super) struct Memory {
    all: Arc<Semaphore>,
    long: Arc<Semaphore>,
    kib: u32,
}

/// The memory of one prompt, until dropped.
#[derive(Debug)]
pub(super) struct Share {
    _all: OwnedSemaphorePermit,
    _long: Option<OwnedSemaphorePermit>,
}

impl Memory {
    pub(super) fn new(bytes: u64) -> Self {
        let kib = u32::try_from(bytes / KIB).unwrap_or(u32::MAX);
        let semaphore = |kib: u32| Arc::new(Semaphore::new(kib as usize));
        Self { all: semaphore(kib), long: semaphore(long_kib(kib)), kib }
    }

    /// Most that one prompt may take, in bytes.
    pub(super) fn most(&self) -> u64 {
        u64::from(long_kib(self.kib)) * KIB
    }

    /// A share of so many bytes, or of [`Self::most`] if that is less.
    pub(super) async fn share(&self, bytes: u64) -> Share {
        let kib = self.kib_of(bytes);
        let long = match self.is_long(bytes) {
            true => Some(take(&self.long, kib.max(long_kib(self.kib) / LONG_AT_ONCE)).await),
            false => None,
        };
        Share { _all: take(&self.all, kib).await, _long: long }
    }

    /// Whether a prompt that takes so many bytes is long.
    pub(super) fn is_long(&self, bytes: u64) -> bool {
        self.kib_of(bytes) > self.kib / LONG_PART
    }

    fn kib_of(&self, bytes: u64) -> u32 {
        u32::try_from(bytes.div_ceil(KIB)).unwrap_or(u32::MAX).min(long_kib(self.kib))
    }
}

fn long_kib(kib: u32) -> u32 {
    kib - kib / 4
}

async fn take(semaphore: &Arc<Semaphore>, kib: u32) -> OwnedSemaphorePermit {
    semaphore.clone().acquire_many_owned(kib).await.expect("nothing closes it")
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures::FutureExt as _;

    const MIB: u64 = 1 << 20;

    #[test]
    fn all_prompts_together_have_a_bound() {
        for (mib, at_once) in [(24, 16), (25, 3), (60, 3), (96, 3), (97, 2), (288, 1), (1000, 1)] {
            let memory = Memory::new(384 * MIB);
            let have: Vec<Share> = (0..64).map_while(|_| memory.share(mib * MIB).now_or_never()).collect();
            assert_eq!(have.len(), at_once, "{mib} MiB each");
            assert!(mib.min(288) * have.len() as u64 <= 384);
            drop(have);
            assert_eq!(memory.all.available_permits() as u64, 384 * MIB / KIB);
        }
        assert_eq!(Memory::new(384 * MIB).most(), 288 * MIB);
        assert!(Memory::new(u64::MAX).share(u64::MAX).now_or_never().is_some());
    }

    #[test]
    fn short_prompts_do_not_wait_for_long_ones() {
        let memory = Memory::new(384 * MIB);
        let long = memory.share(memory.most()).now_or_never().unwrap();
        let mut next_long = Box::pin(memory.share(memory.most()));
        assert!(next_long.as_mut().now_or_never().is_none());
        let mut short: Vec<Share> = (0..5).map_while(|_| memory.share(24 * MIB).now_or_never()).collect();
        assert_eq!(short.len(), 4);
        short.pop();
        short.extend(memory.share(24 * MIB).now_or_never());
        assert_eq!(short.len(), 4, "the long one that waits is not before it");
        drop(long);
        assert!(next_long.now_or_never().is_some(), "short ones leave it its part");
    }

    #[test]
    fn a_long_prompt_gets_its_share_before_later_short_ones() {
        let memory = Memory::new(384 * MIB);
        let mut short: Vec<Share> = (0..16).map_while(|_| memory.share(24 * MIB).now_or_never()).collect();
        let (mut long, mut later) = (Box::pin(memory.share(288 * MIB)), Box::pin(memory.share(24 * MIB)));
        assert!(long.as_mut().now_or_never().is_none() && later.as_mut().now_or_never().is_none());
        short.truncate(5);
        assert!(long.as_mut().now_or_never().is_none() && later.as_mut().now_or_never().is_none());
        short.truncate(4);
        let long = long.now_or_never();
        assert!(long.is_some() && later.as_mut().now_or_never().is_none());
        short.truncate(3);
        assert!(later.now_or_never().is_some());
    }
}
