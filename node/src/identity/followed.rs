//! What is made from the files of a folder, and made again when they change.

use super::IdentityError;
use super::files::{Files, FolderSetting};
use arc_swap::ArcSwap;
use std::path::Path;
use std::sync::{Arc, Weak};
use std::time::Duration;
use tokio::task::spawn_blocking;
use tokio::time::{sleep, timeout};

/// Longest wait for the files at the start.
const START_MAX: Duration = Duration::from_secs(30);

/// The newest `T` whose files could be used. It is read again while this lives.
pub(super) struct Followed<T> {
    made: ArcSwap<T>,
    make: Make<T>,
}

type Make<T> = Box<dyn Fn(&Files) -> Result<T, IdentityError> + Send + Sync>;

impl<T: Send + Sync + 'static> Followed<T> {
    /// Makes it from the files in `dir`, and reads them again at the interval `every`. Must be called within a tokio
    /// runtime.
    pub(super) async fn start(
        setting: FolderSetting,
        dir: &Path,
        every: Duration,
        make: impl Fn(&Files) -> Result<T, IdentityError> + Send + Sync + 'static,
    ) -> Result<Arc<Self>, IdentityError> {
        let files = read(setting, dir, START_MAX).await?;
        let this = Arc::new(Self { made: ArcSwap::from_pointee(make(&files)?), make: Box::new(make) });
        tokio::spawn(follow(Arc::downgrade(&this), files, every));
        Ok(this)
    }

    pub(super) fn now(&self) -> arc_swap::Guard<Arc<T>> {
        self.made.load()
    }
}

async fn read(setting: FolderSetting, dir: &Path, within: Duration) -> Result<Files, IdentityError> {
    let failed = |source| IdentityError::Read { setting, path: dir.into(), source };
    let at = dir.to_path_buf();
    let reading = spawn_blocking(move || Files::read(setting, &at));
    let read = timeout(within, reading).await.map_err(|_| failed(std::io::ErrorKind::TimedOut.into()))?;
    read.unwrap_or_else(|panic| Err(failed(std::io::Error::other(panic))))
}

/// Applies files as they change; invalid files change nothing, and are logged once.
async fn follow<T: Send + Sync + 'static>(followed: Weak<Followed<T>>, mut seen: Files, every: Duration) {
    let (dir, setting) = (seen.dir().to_path_buf(), seen.setting());
    let mut told = String::new();
    loop {
        sleep(every).await;
        let Some(followed) = followed.upgrade() else { return };
        let found = match read(setting, &dir, every.max(START_MAX)).await {
            Ok(files) if files == seen => continue,
            Ok(files) => (followed.make)(&files).map(|made| (files, made)),
            Err(error) => Err(error),
        };
        match found {
            Ok((files, made)) => {
                tracing::info!(setting = setting.name(), dir = %dir.display(), "takes the folder's new files");
                followed.made.store(Arc::new(made));
                seen = files;
                told.clear();
            }
            Err(error) => {
                let problem = error.chain();
                if told != problem {
                    tracing::warn!(setting = setting.name(), problem, "keeps the current files");
                    told = problem;
                }
            }
        }
    }
}
