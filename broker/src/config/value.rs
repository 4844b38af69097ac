//! The types a setting can have, how each is read and written, and what is said when it is
//! malformed.
//!
//! Invariant: `parse(text(v)) == v` for every value, and nothing is read as something it does not
//! say: a value that is not wholly understood is refused.

use std::fmt;
use std::path::{Path, PathBuf};

/// Highest CPU number that a core list may name.
pub const CORE_NUMBER_MAX: usize = 4_095;

/// Highest number of delay levels; the level travels as a small number in a property.
pub const DELAY_LEVELS_MAX: usize = 256;

/// A type of setting.
pub trait Value: Sized {
    /// What a value looks like, for the refusal: "expected …".
    const EXPECTED: &'static str;
    /// Reads a value; nothing when the text is not one.
    fn parse(text: &str) -> Option<Self>;
    /// Writes the value as a config file has it.
    fn text(&self) -> String;
}

impl Value for bool {
    const EXPECTED: &'static str = "true or false";
    fn parse(text: &str) -> Option<Self> {
        if text.eq_ignore_ascii_case("true") {
            Some(true)
        } else if text.eq_ignore_ascii_case("false") {
            Some(false)
        } else {
            None
        }
    }
    fn text(&self) -> String {
        self.to_string()
    }
}

macro_rules! whole_number {
    ($($Type:ty => $expected:literal),*) => {$(
        impl Value for $Type {
            const EXPECTED: &'static str = $expected;
            fn parse(text: &str) -> Option<Self> {
                text.parse().ok()
            }
            fn text(&self) -> String {
                self.to_string()
            }
        }
    )*};
}

whole_number! {
    u16 => "a whole number from 0 to 65535",
    u32 => "a whole number from 0 to 4294967295",
    u64 => "a whole number, 0 or more",
    usize => "a whole number, 0 or more"
}

impl Value for String {
    const EXPECTED: &'static str = "text";
    fn parse(text: &str) -> Option<Self> {
        Some(text.to_owned())
    }
    fn text(&self) -> String {
        self.clone()
    }
}

/// A name that travels in routes and file names: no blanks.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Name(pub String);

impl Value for Name {
    const EXPECTED: &'static str = "a name without blanks, at most 255 characters";
    fn parse(text: &str) -> Option<Self> {
        let fine = text.len() <= 255 && !text.contains(char::is_whitespace);
        fine.then(|| Self(text.to_owned()))
    }
    fn text(&self) -> String {
        self.0.clone()
    }
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl PartialEq<str> for Name {
    fn eq(&self, other: &str) -> bool {
        self.0 == other
    }
}

/// A directory or file of this machine. A leading `~` stands for the home directory, as Java's
/// default has it.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct FilePath(pub PathBuf);

impl FilePath {
    /// The path itself.
    #[must_use]
    pub fn as_path(&self) -> &Path {
        &self.0
    }

    /// Whether nothing is set.
    #[must_use]
    pub fn is_unset(&self) -> bool {
        self.0.as_os_str().is_empty()
    }
}

impl Value for FilePath {
    const EXPECTED: &'static str = "a path";
    fn parse(text: &str) -> Option<Self> {
        let home = text
            .strip_prefix('~')
            .filter(|rest| rest.is_empty() || rest.starts_with('/'));
        match (home, std::env::var_os("HOME")) {
            (Some(rest), Some(home)) => {
                Some(Self(PathBuf::from(home).join(rest.trim_start_matches('/'))))
            }
            _ => Some(Self(PathBuf::from(text))),
        }
    }
    fn text(&self) -> String {
        self.0.display().to_string()
    }
}

/// A size in bytes. Written as a plain number; `K`, `M`, `G` with an optional `iB` are read too.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub struct Bytes(pub u64);

impl Value for Bytes {
    const EXPECTED: &'static str = "a size in bytes, such as 1073741824, 512MiB or 1GiB";
    fn parse(text: &str) -> Option<Self> {
        let split = text
            .find(|c: char| !c.is_ascii_digit())
            .unwrap_or(text.len());
        let (digits, unit) = text.split_at(split);
        let shift = match unit.trim_start() {
            "" | "B" => 0,
            "K" | "k" | "KiB" => 10,
            "M" | "m" | "MiB" => 20,
            "G" | "g" | "GiB" => 30,
            "T" | "TiB" => 40,
            _ => return None,
        };
        digits
            .parse::<u64>()
            .ok()?
            .checked_mul(1 << shift)
            .map(Self)
    }
    fn text(&self) -> String {
        self.0.to_string()
    }
}

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const UNITS: [(u64, &str); 4] = [
            (1 << 40, "TiB"),
            (1 << 30, "GiB"),
            (1 << 20, "MiB"),
            (1 << 10, "KiB"),
        ];
        for (size, unit) in UNITS {
            if self.0 >= size && self.0.is_multiple_of(size) {
                return write!(f, "{} {unit}", self.0 / size);
            }
            if self.0 >= size {
                let tenths = self.0 / (size / 10);
                return write!(f, "{}.{} {unit}", tenths / 10, tenths % 10);
            }
        }
        write!(f, "{} B", self.0)
    }
}

macro_rules! word {
    (
        $(#[$outer:meta])*
        $Name:ident, $expected:literal {
            $($(#[$doc:meta])* $Variant:ident = $text:literal),* $(,)?
        }
    ) => {
        $(#[$outer])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        pub enum $Name { $($(#[$doc])* $Variant),* }

        impl Value for $Name {
            const EXPECTED: &'static str = $expected;
            fn parse(text: &str) -> Option<Self> {
                $(if text.eq_ignore_ascii_case($text) { return Some(Self::$Variant); })*
                None
            }
            fn text(&self) -> String {
                self.to_string()
            }
        }

        impl fmt::Display for $Name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(match self { $(Self::$Variant => $text),* })
            }
        }
    };
}

word! {
    /// When a message counts as stored.
    FlushDiskType, "SYNC_FLUSH or ASYNC_FLUSH" {
        /// After the device has it.
        SyncFlush = "SYNC_FLUSH",
        /// Once it survives the end of the process.
        AsyncFlush = "ASYNC_FLUSH",
    }
}

word! {
    /// The part a broker plays among its replicas.
    BrokerRole, "ASYNC_MASTER, SYNC_MASTER or SLAVE" {
        /// Acks without waiting for replicas.
        AsyncMaster = "ASYNC_MASTER",
        /// Acks when replicas have the message.
        SyncMaster = "SYNC_MASTER",
        /// Copies a master.
        Slave = "SLAVE",
    }
}

word! {
    /// Where metrics go.
    MetricsExporter, "DISABLE, PROM, OTLP_GRPC or LOG" {
        /// Nowhere but the health port.
        Disable = "DISABLE",
        /// A page that Prometheus reads.
        Prom = "PROM",
        /// An OpenTelemetry collector.
        OtlpGrpc = "OTLP_GRPC",
        /// The log.
        Log = "LOG",
    }
}

word! {
    /// How badly a facility of the machine is wanted.
    Need, "auto or require" {
        /// Use it, or say once what is missing and go on slower.
        Auto = "auto",
        /// Use it, or refuse to start.
        Require = "require",
    }
}

word! {
    /// How log writes reach the disk.
    LogPort, "auto, uring or thread" {
        /// A probe at start chooses.
        Auto = "auto",
        /// By the core's own ring.
        Uring = "uring",
        /// By one writer thread for each disk.
        Thread = "thread",
    }
}

word! {
    /// Whether TLS is spoken on the listening ports.
    TlsMode, "disabled, permissive or enforcing" {
        /// Never.
        Disabled = "disabled",
        /// When the client begins with it.
        Permissive = "permissive",
        /// Always.
        Enforcing = "enforcing",
    }
}

word! {
    /// How consumers of a topic take messages when nothing else is said.
    MessageRequestMode, "PULL or POP" {
        /// Queues are shared out among consumers.
        Pull = "PULL",
        /// Every consumer takes from every queue.
        Pop = "POP",
    }
}

/// Where the write buffers that outlive the process lie.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum BufferDir {
    /// A directory that survives the process, if there is one.
    Auto,
    /// Nowhere: acks wait for the write.
    None,
    /// This directory, which the operator says survives the process.
    Path(PathBuf),
}

impl Value for BufferDir {
    const EXPECTED: &'static str =
        "auto, none or an absolute path of a tmpfs or hugetlbfs directory";
    fn parse(text: &str) -> Option<Self> {
        match text {
            "auto" => Some(Self::Auto),
            "none" => Some(Self::None),
            path if path.starts_with('/') => Some(Self::Path(PathBuf::from(path))),
            _ => None,
        }
    }
    fn text(&self) -> String {
        match self {
            Self::Auto => "auto".to_owned(),
            Self::None => "none".to_owned(),
            Self::Path(path) => path.display().to_string(),
        }
    }
}

/// CPUs by number, ascending, each once. Empty means: all this process may use.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct CoreList(pub Vec<usize>);

impl Value for CoreList {
    const EXPECTED: &'static str = "CPU numbers such as 0,2-5 (or auto: all this process may use)";
    fn parse(text: &str) -> Option<Self> {
        if matches!(text, "" | "auto" | "all") {
            return Some(Self::default());
        }
        let mut cores = Vec::new();
        for part in text.split(',') {
            let (first, last) = part
                .trim()
                .split_once('-')
                .unwrap_or((part.trim(), part.trim()));
            let (first, last) = (first.parse::<usize>().ok()?, last.parse::<usize>().ok()?);
            if first > last || last > CORE_NUMBER_MAX {
                return None;
            }
            cores.extend(first..=last);
        }
        cores.sort_unstable();
        cores.dedup();
        Some(Self(cores))
    }
    fn text(&self) -> String {
        if self.0.is_empty() {
            "auto".to_owned()
        } else {
            self.to_string()
        }
    }
}

impl fmt::Display for CoreList {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut cores = self.0.iter().copied().peekable();
        let mut separator = "";
        while let Some(first) = cores.next() {
            let mut last = first;
            while let Some(next) = cores.next_if(|next| *next == last + 1) {
                last = next;
            }
            match last - first {
                0 => write!(f, "{separator}{first}")?,
                1 => write!(f, "{separator}{first},{last}")?,
                _ => write!(f, "{separator}{first}-{last}")?,
            }
            separator = ",";
        }
        Ok(())
    }
}

/// Hours of the day, as `deleteWhen` has them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Hours(pub Vec<u8>);

impl Value for Hours {
    const EXPECTED: &'static str =
        "hours of the day from 00 to 23, separated by ; such as 04 or 04;16";
    fn parse(text: &str) -> Option<Self> {
        let hours: Option<Vec<u8>> = text
            .split(';')
            .map(|hour| hour.trim().parse().ok().filter(|h| *h < 24))
            .collect();
        hours.map(Self)
    }
    fn text(&self) -> String {
        self.0
            .iter()
            .map(|hour| format!("{hour:02}"))
            .collect::<Vec<_>>()
            .join(";")
    }
}

/// The delays behind delay levels 1, 2, 3, …
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DelayLevels {
    text: String,
    delays_ms: Vec<u64>,
}

impl DelayLevels {
    /// Delay of each level in milliseconds; the first entry is level 1.
    #[must_use]
    pub fn delays_ms(&self) -> &[u64] {
        &self.delays_ms
    }

    /// The levels every RocketMQ broker has unless told otherwise.
    #[must_use]
    pub fn standard() -> Self {
        const STANDARD: &str = "1s 5s 10s 30s 1m 2m 3m 4m 5m 6m 7m 8m 9m 10m 20m 30m 1h 2h";
        Self::parse(STANDARD).unwrap_or(Self {
            text: String::new(),
            delays_ms: Vec::new(),
        })
    }
}

impl Value for DelayLevels {
    const EXPECTED: &'static str =
        "delays separated by blanks, each a number and s, m, h or d: 1s 5s 10s";
    fn parse(text: &str) -> Option<Self> {
        let delays: Option<Vec<u64>> = text.split_whitespace().map(delay_ms).collect();
        let delays_ms = delays.filter(|d| !d.is_empty() && d.len() <= DELAY_LEVELS_MAX)?;
        Some(Self {
            text: text.to_owned(),
            delays_ms,
        })
    }
    fn text(&self) -> String {
        self.text.clone()
    }
}

fn delay_ms(word: &str) -> Option<u64> {
    let unit_ms = match word.chars().next_back()? {
        's' => 1_000,
        'm' => 60_000,
        'h' => 3_600_000,
        'd' => 86_400_000,
        _ => return None,
    };
    let number = word.get(..word.len() - 1)?.parse::<u64>().ok()?;
    number.checked_mul(unit_ms)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn returns<V: Value + PartialEq + fmt::Debug>(text: &str) -> V {
        let value = V::parse(text).unwrap_or_else(|| panic!("{text:?} must be accepted"));
        assert_eq!(
            V::parse(&value.text()),
            Some(V::parse(text).unwrap()),
            "{text:?}"
        );
        value
    }

    #[test]
    fn values_are_read_and_survive_being_written() {
        assert!(returns::<bool>("TRUE"));
        assert_eq!(returns::<u16>("10911"), 10_911);
        assert_eq!(returns::<Bytes>("64MiB"), Bytes(64 << 20));
        assert_eq!(returns::<Bytes>("1073741824"), Bytes(1 << 30));
        assert_eq!(
            returns::<FlushDiskType>("SYNC_FLUSH"),
            FlushDiskType::SyncFlush
        );
        assert_eq!(returns::<Hours>("04;16"), Hours(vec![4, 16]));
        assert_eq!(
            returns::<BufferDir>("/dev/shm"),
            BufferDir::Path("/dev/shm".into())
        );
        assert_eq!(
            returns::<CoreList>("3,0,5-7"),
            CoreList(vec![0, 3, 5, 6, 7])
        );
        assert_eq!(CoreList(vec![0, 1, 2, 4]).text(), "0-2,4");
        let levels = returns::<DelayLevels>("1s 2m 1h 1d");
        assert_eq!(levels.delays_ms(), [1_000, 120_000, 3_600_000, 86_400_000]);
        assert_eq!(DelayLevels::standard().delays_ms().len(), 18);
    }

    #[test]
    fn values_that_are_not_wholly_understood_are_refused() {
        assert_eq!(bool::parse("yes"), None);
        assert_eq!(u16::parse("70000"), None);
        assert_eq!(u64::parse("-1"), None);
        assert_eq!(u64::parse("500 # ms"), None);
        assert_eq!(Bytes::parse("1 GB of disk"), None);
        assert_eq!(Bytes::parse("99999999999G"), None);
        assert_eq!(FlushDiskType::parse("SYNC"), None);
        assert_eq!(Hours::parse("24"), None);
        assert_eq!(CoreList::parse("3-1"), None);
        assert_eq!(CoreList::parse("0-99999999"), None);
        assert_eq!(DelayLevels::parse("1s 5x"), None);
        assert_eq!(DelayLevels::parse("1s 5秒"), None);
        assert_eq!(BufferDir::parse("shm"), None);
        assert_eq!(Name::parse("broker a"), None);
    }

    #[test]
    fn sizes_are_shown_in_the_largest_fitting_unit() {
        assert_eq!(Bytes(64 << 20).to_string(), "64 MiB");
        assert_eq!(Bytes(1_500).to_string(), "1.4 KiB");
        assert_eq!(Bytes(12).to_string(), "12 B");
    }
}
