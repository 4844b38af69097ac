//! Control files (topics, groups, offsets, users) kept in generations.
//!
//! Owns the writing and reading of small files that must survive a power cut. Invariant: a file
//! that was saved once is never read as less than the newest generation that is whole, and never as
//! empty.
//!
//! Beside `topics.json` lie `topics.json.1` and `.2`, the generations before it, and
//! `topics.json.sum` with its copy `topics.json.sum2`, which list length and checksum of the last
//! generations. The list is written before the data is put in place, so at any moment each whole
//! generation has its line. The data files hold nothing but what RocketMQ itself would read there.

use std::fs::{self, File};
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use flate2::Crc;
use shard::io::Storage;
use shard::io::real::{DirectMode, RealStorage};

/// Generations kept in place: the current one and those before it.
pub const GENERATIONS_MAX: usize = 3;

/// Lines kept in the list of checksums; more than generations, since a save may be cut short.
const SUM_LINES_MAX: usize = GENERATIONS_MAX + 2;

/// What went wrong with a control file.
#[derive(Debug, thiserror::Error)]
pub enum SettingsError {
    /// The system refused an operation.
    #[error("cannot {operation} {path}: {source}")]
    Io {
        /// What was tried.
        operation: &'static str,
        /// On which file.
        path: PathBuf,
        /// The system's answer.
        source: io::Error,
    },
    /// No generation is whole.
    #[error(
        "no generation of {path} is whole ({details}); put a whole copy there and delete \
         {path}.sum and {path}.sum2, or delete {path} and every {path}.* to begin without one"
    )]
    AllBad {
        /// The current file.
        path: PathBuf,
        /// What is wrong with each generation.
        details: String,
    },
    /// The name has a directory in it.
    #[error("{0:?} is not a plain file name")]
    Name(String),
}

/// A generation that was saved.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Saved {
    /// Its number, one more than the one before.
    pub generation: u64,
}

/// A generation that was read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Loaded {
    /// The content.
    pub bytes: Vec<u8>,
    /// Its number; 0 for a file that something else wrote.
    pub generation: u64,
    /// The file it was read from.
    pub path: PathBuf,
    /// Set when a newer generation is damaged: what happened, for the log.
    pub fallback: Option<String>,
}

/// One line of the list of checksums.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Sum {
    generation: u64,
    length: u64,
    crc: u32,
    saved_ms: u64,
}

impl Sum {
    fn of(generation: u64, bytes: &[u8]) -> Self {
        let length = bytes.len().try_into().unwrap_or(u64::MAX);
        Self {
            generation,
            length,
            crc: crc_of(bytes),
            saved_ms: now_ms(),
        }
    }

    fn line(&self) -> String {
        let Self {
            generation,
            length,
            crc,
            saved_ms,
        } = self;
        let body =
            format!("generation {generation} length {length} crc32 {crc:08x} saved {saved_ms}");
        format!("{body} check {:08x}\n", crc_of(body.as_bytes()))
    }

    /// A line with a wrong check is no line, so damage costs the line it hits and no other.
    fn parse(line: &str) -> Option<Self> {
        let (body, check) = line.rsplit_once(" check ")?;
        if u32::from_str_radix(check, 16).ok()? != crc_of(body.as_bytes()) {
            return None;
        }
        let mut words = body.split(' ');
        let mut field = |name: &str| {
            words
                .next()
                .filter(|w| *w == name)
                .and_then(|_| words.next())
        };
        Some(Self {
            generation: field("generation")?.parse().ok()?,
            length: field("length")?.parse().ok()?,
            crc: u32::from_str_radix(field("crc32")?, 16).ok()?,
            saved_ms: field("saved")?.parse().ok()?,
        })
    }

    fn fits(&self, bytes: &[u8]) -> bool {
        u64::try_from(bytes.len()).is_ok_and(|length| length == self.length)
            && crc_of(bytes) == self.crc
    }
}

/// The files of one control file.
struct Files<'a, S> {
    storage: &'a S,
    dir: PathBuf,
    name: String,
}

impl<'a, S: Storage> Files<'a, S> {
    fn new(storage: &'a S, dir: &Path, name: &str) -> Result<Self, SettingsError> {
        let plain = Path::new(name).file_name().is_some_and(|file| file == name);
        if !plain {
            return Err(SettingsError::Name(name.to_owned()));
        }
        Ok(Self {
            storage,
            dir: dir.to_owned(),
            name: name.to_owned(),
        })
    }

    fn current(&self) -> PathBuf {
        self.dir.join(&self.name)
    }

    fn with(&self, suffix: &str) -> PathBuf {
        self.dir.join(format!("{}.{suffix}", self.name))
    }

    /// Newest first. A finished temporary file counts: its rename may be all that a cut took away.
    fn candidates(&self) -> Vec<PathBuf> {
        let mut all = vec![self.with("tmp"), self.current()];
        all.extend((1..GENERATIONS_MAX).map(|age| self.with(&age.to_string())));
        all
    }

    fn sum_files(&self) -> [PathBuf; 2] {
        [self.with("sum"), self.with("sum2")]
    }

    /// Every valid line of both copies, newest first, each once.
    fn sums(&self) -> Result<Vec<Sum>, SettingsError> {
        let mut sums: Vec<Sum> = Vec::new();
        for path in self.sum_files() {
            let bytes = self.read_if_there(&path)?.unwrap_or_default();
            for sum in String::from_utf8_lossy(&bytes)
                .lines()
                .filter_map(Sum::parse)
            {
                if !sums.contains(&sum) {
                    sums.push(sum);
                }
            }
        }
        sums.sort_by_key(|sum| std::cmp::Reverse(sum.generation));
        Ok(sums)
    }

    fn is_there(&self, path: &Path) -> bool {
        self.storage.modified_ms(path).is_ok()
    }

    fn write_synced(&self, path: &Path, bytes: &[u8]) -> Result<(), SettingsError> {
        let written = self.storage.write_synced(path, bytes);
        written.map_err(io_error("write", path))
    }

    fn rename(&self, from: &Path, to: &Path) -> Result<(), SettingsError> {
        let renamed = self.storage.rename(from, to);
        renamed.map_err(io_error("put in place", to))
    }

    fn sync_dir(&self) -> Result<(), SettingsError> {
        let synced = self.storage.sync_dir(&self.dir);
        synced.map_err(io_error("sync the directory", &self.dir))
    }

    fn read_if_there(&self, path: &Path) -> Result<Option<Vec<u8>>, SettingsError> {
        match self.storage.read_file(path) {
            Ok(bytes) => Ok(Some(bytes)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            // A sector that cannot be read is a damaged generation, not the end of the start.
            Err(error) if error.raw_os_error() == Some(libc::EIO) => Ok(Some(Vec::new())),
            Err(error) => Err(io_error("read", path)(error)),
        }
    }
}

/// Saves `bytes` as the newest generation of `name` in `dir`, which is made when missing. Blocks
/// until the device has it.
///
/// # Errors
/// When the system refuses a step. Generations saved before are untouched then.
pub fn save(dir: &Path, name: &str, bytes: &[u8]) -> Result<Saved, SettingsError> {
    save_on(&RealStorage::new(DirectMode::Auto), dir, name, bytes)
}

/// The same on a file system given.
///
/// # Errors
/// As [`save`].
pub fn save_on<S: Storage>(
    storage: &S,
    dir: &Path,
    name: &str,
    bytes: &[u8],
) -> Result<Saved, SettingsError> {
    let files = Files::new(storage, dir, name)?;
    let made = storage.create_dirs(dir);
    made.map_err(io_error("create the directory", dir))?;
    let mut sums = files.sums()?;
    finish_cut_save(&files, &mut sums)?;
    let current = inspect_current(&files, &mut sums)?;
    let generation = sums.first().map_or(0, |sum| sum.generation) + 1;
    let temporary = files.with("tmp");
    files.write_synced(&temporary, bytes)?;
    sums.insert(0, Sum::of(generation, bytes));
    sums.truncate(SUM_LINES_MAX);
    write_sums(&files, &sums)?;
    put_in_place(&files, current)?;
    files.sync_dir()?;
    Ok(Saved { generation })
}

/// Makes the finished temporary file the current one.
fn put_in_place<S: Storage>(files: &Files<'_, S>, current: Current) -> Result<(), SettingsError> {
    match current {
        Current::Whole => rotate(files)?,
        Current::Damaged => {
            // Kept for whoever wants to look, but never in the place of a whole generation.
            files.rename(&files.current(), &files.with("damaged"))?;
        }
        Current::Missing => {}
    }
    files.rename(&files.with("tmp"), &files.current())
}

/// Ends a save that a kill cut off behind its list of checksums: its temporary file may be the only
/// copy of the newest generation, which the next save must not write over.
fn finish_cut_save<S: Storage>(
    files: &Files<'_, S>,
    sums: &mut Vec<Sum>,
) -> Result<(), SettingsError> {
    let left = files.read_if_there(&files.with("tmp"))?;
    let newest = sums
        .first()
        .is_some_and(|sum| left.is_some_and(|bytes| sum.fits(&bytes)));
    if newest {
        let current = inspect_current(files, sums)?;
        put_in_place(files, current)?;
    }
    Ok(())
}

/// Reads the newest whole generation of `name` in `dir`; nothing when none was ever saved.
///
/// # Errors
/// When files are there but no generation is whole, or the system refuses to read.
pub fn load(dir: &Path, name: &str) -> Result<Option<Loaded>, SettingsError> {
    load_on(&RealStorage::new(DirectMode::Auto), dir, name)
}

/// The same on a file system given.
///
/// # Errors
/// As [`load`].
pub fn load_on<S: Storage>(
    storage: &S,
    dir: &Path,
    name: &str,
) -> Result<Option<Loaded>, SettingsError> {
    let files = Files::new(storage, dir, name)?;
    let sums = files.sums()?;
    let mut contents = Vec::new();
    let mut something = files.sum_files().iter().any(|path| files.is_there(path));
    for (index, path) in files.candidates().into_iter().enumerate() {
        let content = files.read_if_there(&path)?;
        // A temporary file alone is a first save that was cut off before it promised anything.
        something |= index > 0 && content.is_some();
        contents.push((path, content));
    }
    if !something {
        return Ok(None);
    }
    let found = if sums.is_empty() {
        newest_unlisted(&contents)
    } else {
        newest(&contents, &sums)
    };
    let Some((index, sum)) = found else {
        let details = contents
            .iter()
            .map(|(path, bytes)| describe(path, bytes.as_deref()));
        let details = details.collect::<Vec<_>>().join(", ");
        return Err(SettingsError::AllBad {
            path: files.current(),
            details,
        });
    };
    let newest_known = sums.first().map_or(0, |sum| sum.generation);
    let (path, bytes) = contents.swap_remove(index);
    let generation = sum.map_or(0, |sum| sum.generation);
    let listed = files.sum_files().iter().any(|file| files.is_there(file));
    let unverified = sum.is_none() && listed;
    let fallback = fallback_words(&files, &path, generation, newest_known, sum, unverified);
    if let Some(words) = &fallback {
        tracing::warn!("{words}");
    }
    Ok(Some(Loaded {
        bytes: bytes.unwrap_or_default(),
        generation,
        path,
        fallback,
    }))
}

/// Replaces a file whole: written beside it, synced, renamed. What it was before stays as `.bak`.
///
/// # Errors
/// When the system refuses a step; the file is as before then.
pub fn replace_file(path: &Path, bytes: &[u8]) -> io::Result<()> {
    // A link is followed, so that the file behind it changes and the link stays.
    let path = fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
    let dir = match path.parent() {
        Some(dir) if !dir.as_os_str().is_empty() => dir.to_owned(),
        _ => PathBuf::from("."),
    };
    fs::create_dir_all(&dir)?;
    let beside = |suffix: &str| {
        let mut name = path.clone().into_os_string();
        name.push(suffix);
        PathBuf::from(name)
    };
    let temporary = beside(".tmp");
    let mut file = File::create(&temporary)?;
    if let Ok(metadata) = fs::metadata(&path) {
        file.set_permissions(metadata.permissions())?;
        fs::copy(&path, beside(".bak"))?;
    }
    file.write_all(bytes)?;
    file.sync_all()?;
    fs::rename(&temporary, &path)?;
    File::open(&dir)?.sync_all()
}

type Content = (PathBuf, Option<Vec<u8>>);

/// The file whose content has the line of the highest generation.
fn newest(contents: &[Content], sums: &[Sum]) -> Option<(usize, Option<Sum>)> {
    sums.iter().find_map(|sum| {
        let fits = |(_, bytes): &Content| bytes.as_ref().is_some_and(|bytes| sum.fits(bytes));
        contents
            .iter()
            .position(fits)
            .map(|index| (index, Some(*sum)))
    })
}

/// Without any list (another program's file, or both copies lost) the first that looks complete.
fn newest_unlisted(contents: &[Content]) -> Option<(usize, Option<Sum>)> {
    // An unfinished temporary file is of no use without its line.
    let whole = |(_, bytes): &Content| bytes.as_ref().is_some_and(|bytes| is_balanced(bytes));
    let index = contents.iter().skip(1).position(whole)?;
    Some((index + 1, None))
}

fn fallback_words<S: Storage>(
    files: &Files<'_, S>,
    path: &Path,
    generation: u64,
    newest_known: u64,
    sum: Option<Sum>,
    unverified: bool,
) -> Option<String> {
    let current = files.current();
    if unverified {
        return Some(format!(
            "{}: its list of checksums is damaged; using {} as it is",
            current.display(),
            path.display()
        ));
    }
    if generation >= newest_known && (path == current || path == files.with("tmp")) {
        return None;
    }
    let age = sum.map_or(0, |sum| now_ms().saturating_sub(sum.saved_ms));
    Some(format!(
        "{} is damaged or missing; using generation {generation} of at most {newest_known} from \
         {}, saved {:?} ago. If it was edited by hand, delete its .sum and .sum2 files before \
         the start",
        current.display(),
        path.display(),
        Duration::from_secs(age / 1000)
    ))
}

fn describe(path: &Path, bytes: Option<&[u8]>) -> String {
    let name = path
        .file_name()
        .unwrap_or_default()
        .to_string_lossy()
        .into_owned();
    match bytes {
        None => format!("{name} is missing"),
        Some([]) => format!("{name} is empty"),
        Some(bytes) if bytes.iter().all(|byte| *byte == 0) => format!("{name} is all zeros"),
        Some(bytes) => format!("{name} with {} bytes fails its check", bytes.len()),
    }
}

enum Current {
    Missing,
    Whole,
    Damaged,
}

/// Tells whether the current file may become the generation before. One that another program wrote
/// gets a line of its own, as generation 0.
fn inspect_current<S: Storage>(
    files: &Files<'_, S>,
    sums: &mut Vec<Sum>,
) -> Result<Current, SettingsError> {
    let Some(bytes) = files.read_if_there(&files.current())? else {
        return Ok(Current::Missing);
    };
    if sums.iter().any(|sum| sum.fits(&bytes)) {
        return Ok(Current::Whole);
    }
    if sums.is_empty() && is_balanced(&bytes) {
        sums.push(Sum::of(0, &bytes));
        return Ok(Current::Whole);
    }
    Ok(Current::Damaged)
}

/// Moves every generation one place back. The current one is linked, not moved, so that its name
/// never lacks a file.
fn rotate<S: Storage>(files: &Files<'_, S>) -> Result<(), SettingsError> {
    for age in (1..GENERATIONS_MAX - 1).rev() {
        let from = files.with(&age.to_string());
        if files.is_there(&from) {
            files.rename(&from, &files.with(&(age + 1).to_string()))?;
        }
    }
    let link = files.with("link");
    let _ = files.storage.remove(&link);
    let current = files.current();
    if files.storage.link(&current, &link).is_err() {
        // Some file systems have no links; the name is then empty for a moment, which load allows
        // for.
        return files.rename(&current, &files.with("1"));
    }
    files.rename(&link, &files.with("1"))
}

fn write_sums<S: Storage>(files: &Files<'_, S>, sums: &[Sum]) -> Result<(), SettingsError> {
    let text: String = sums.iter().map(Sum::line).collect();
    let temporary = files.with("sum.tmp");
    for path in files.sum_files() {
        files.write_synced(&temporary, text.as_bytes())?;
        files.rename(&temporary, &path)?;
    }
    files.sync_dir()
}

fn io_error(operation: &'static str, path: &Path) -> impl FnOnce(io::Error) -> SettingsError {
    let path = path.to_owned();
    move |source| SettingsError::Io {
        operation,
        path,
        source,
    }
}

/// Whether the text is one JSON object from its first brace to its last. RocketMQ's files have
/// unquoted number keys, which a strict parser refuses, so only the nesting is checked.
fn is_balanced(bytes: &[u8]) -> bool {
    let text = bytes.trim_ascii();
    let mut open: Vec<u8> = Vec::new();
    let (mut in_string, mut escaped) = (false, false);
    for (index, byte) in text.iter().enumerate() {
        if in_string {
            match byte {
                _ if escaped => escaped = false,
                b'\\' => escaped = true,
                b'"' => in_string = false,
                0 => return false,
                _ => {}
            }
            continue;
        }
        match byte {
            b'"' => in_string = true,
            b'{' | b'[' => open.push(*byte),
            b'}' if open.pop() != Some(b'{') => return false,
            b']' if open.pop() != Some(b'[') => return false,
            0 => return false,
            _ => {}
        }
        if open.is_empty() {
            return *byte == b'}' && index + 1 == text.len();
        }
    }
    false
}

fn crc_of(bytes: &[u8]) -> u32 {
    let mut crc = Crc::new();
    crc.update(bytes);
    crc.sum()
}

fn now_ms() -> u64 {
    let since = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default();
    since.as_millis().try_into().unwrap_or(u64::MAX)
}

#[cfg(test)]
#[path = "settings_tests.rs"]
mod tests;
