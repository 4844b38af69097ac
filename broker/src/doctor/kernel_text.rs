//! Reading the kernel's text files: mounts, limits, capabilities, interrupts, cgroups.
//!
//! Invariant: every function here is pure and takes a text, so that each is tested with texts of
//! machines this one is not. A text that is not understood gives nothing, never a guess.

/// Number of the capability that lifts the limit on locked memory.
const CAP_IPC_LOCK_BIT: u32 = 14;

/// A mounted file system.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mount {
    /// Where it is mounted.
    pub point: String,
    /// Its type, such as `ext4`.
    pub kind: String,
    /// Its options, mount and super block together.
    pub options: String,
}

/// The mount that `path` lies in, from `/proc/self/mountinfo`. The last of equal mounts counts: it
/// hides the ones before.
#[must_use]
pub fn mount_of(mountinfo: &str, path: &str) -> Option<Mount> {
    let mut best: Option<Mount> = None;
    for mount in mountinfo.lines().filter_map(parse_mount) {
        let rest = path.strip_prefix(mount.point.trim_end_matches('/'));
        let inside = rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('/'));
        if inside
            && best
                .as_ref()
                .is_none_or(|b| mount.point.len() >= b.point.len())
        {
            best = Some(mount);
        }
    }
    best
}

fn parse_mount(line: &str) -> Option<Mount> {
    let (left, right) = line.split_once(" - ")?;
    let mut left = left.split(' ').skip(4);
    let point = unescape_octal(left.next()?);
    let options = left.next()?;
    let mut right = right.split(' ');
    let kind = right.next()?.to_owned();
    let options = format!("{options},{}", right.nth(1).unwrap_or_default());
    Some(Mount {
        point,
        kind,
        options,
    })
}

/// Blanks in mount points are written as `\040`.
fn unescape_octal(text: &str) -> String {
    text.replace("\\040", " ")
        .replace("\\011", "\t")
        .replace("\\134", "\\")
}

/// The soft limit of one line of `/proc/self/limits`; `u64::MAX` means unlimited.
#[must_use]
pub fn limit_of(limits: &str, name: &str) -> Option<u64> {
    let rest = limits.lines().find_map(|line| line.strip_prefix(name))?;
    match rest.split_whitespace().next()? {
        "unlimited" => Some(u64::MAX),
        number => number.parse().ok(),
    }
}

/// Whether the process holds the capability to lock memory beyond the limit, from
/// `/proc/self/status`.
#[must_use]
pub fn may_lock_beyond_limit(status: &str) -> bool {
    let hex = status
        .lines()
        .find_map(|line| line.strip_prefix("CapEff:"))
        .unwrap_or_default();
    u64::from_str_radix(hex.trim(), 16).is_ok_and(|bits| bits >> CAP_IPC_LOCK_BIT & 1 == 1)
}

/// CPUs that take the interrupts of a device, most first, from `/proc/interrupts`. A line belongs
/// to the device when its last word begins with one of `prefixes`.
#[must_use]
pub fn interrupt_cpus(interrupts: &str, prefixes: &[String]) -> Vec<usize> {
    let mut lines = interrupts.lines();
    let header = lines.next().unwrap_or_default().split_whitespace();
    let cpus: Vec<usize> = header
        .filter_map(|word| word.strip_prefix("CPU")?.parse().ok())
        .collect();
    let mut counts: Vec<(u64, usize)> = cpus.iter().map(|cpu| (0, *cpu)).collect();
    for line in lines {
        let last = line.split_whitespace().next_back().unwrap_or_default();
        if !prefixes
            .iter()
            .any(|prefix| last.starts_with(prefix.as_str()))
        {
            continue;
        }
        for (total, word) in counts.iter_mut().zip(line.split_whitespace().skip(1)) {
            total.0 += word.parse::<u64>().unwrap_or(0);
        }
    }
    counts.retain(|(total, _)| *total > 0);
    counts.sort_by(|a, b| b.cmp(a));
    counts.into_iter().map(|(_, cpu)| cpu).collect()
}

/// How the interrupts of a disk are named, from its path under `/sys/devices`, and the disk's own
/// name.
#[must_use]
pub fn disk_of(sys_path: &str) -> Option<(String, Vec<String>)> {
    let parts: Vec<&str> = sys_path.split('/').collect();
    if let Some(at) = parts.iter().position(|part| *part == "block") {
        let disk = (*parts.get(at + 1)?).to_owned();
        let controller = at
            .checked_sub(1)
            .and_then(|before| parts.get(before))
            .unwrap_or(&"");
        let prefixes = match controller.strip_prefix("virtio") {
            Some(_) => vec![format!("{controller}-req")],
            None => Vec::new(),
        };
        return Some((disk, prefixes));
    }
    let at = parts.iter().position(|part| *part == "nvme")?;
    let (controller, disk) = (parts.get(at + 1)?, parts.get(at + 2)?);
    Some(((*disk).to_owned(), vec![format!("{controller}q")]))
}

/// `major.minor` of a kernel release such as `6.18.44-custom`.
#[must_use]
pub fn kernel_version(release: &str) -> Option<(u32, u32)> {
    let mut numbers = release
        .split(|c: char| !c.is_ascii_digit())
        .map(str::parse::<u32>);
    Some((numbers.next()?.ok()?, numbers.next()?.ok()?))
}

/// CPUs a cgroup's quota allows, in hundredths, from `cpu.max`: `150000 100000` is 150.
#[must_use]
pub fn quota_of(cpu_max: &str) -> Option<u64> {
    let (quota, period) = cpu_max.trim().split_once(' ')?;
    let (quota, period) = (quota.parse::<u64>().ok()?, period.parse::<u64>().ok()?);
    quota.checked_mul(100)?.checked_div(period)
}

/// The path of this process in the unified hierarchy or the named controller, from
/// `/proc/self/cgroup`.
#[must_use]
pub fn cgroup_path<'a>(cgroup: &'a str, controller: &str) -> Option<&'a str> {
    cgroup.lines().find_map(|line| {
        let (_, rest) = line.split_once(':')?;
        let (controllers, path) = rest.split_once(':')?;
        controllers
            .split(',')
            .any(|name| name == controller)
            .then_some(path)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const MOUNTS: &str = "22 27 0:21 / /proc rw - proc proc rw\n\
        27 1 254:0 / / rw,relatime - ext4 /dev/vda rw,discard\n\
        30 27 0:25 / /dev/shm rw - tmpfs tmpfs rw,size=24684084k\n\
        31 27 8:1 / /data rw - xfs /dev/sda1 rw\n\
        32 27 0:40 / /data/my\\040dir rw - ramfs none rw\n";

    #[test]
    fn the_innermost_mount_of_a_path_is_found() {
        for (path, kind) in [
            ("/", "ext4"),
            ("/x/y", "ext4"),
            ("/dev/shm", "tmpfs"),
            ("/dev/shmx", "ext4"),
            ("/data/a", "xfs"),
            ("/data/my dir/a", "ramfs"),
        ] {
            assert_eq!(mount_of(MOUNTS, path).unwrap().kind, kind, "{path}");
        }
        assert!(mount_of(MOUNTS, "/").unwrap().options.contains("discard"));
        assert_eq!(mount_of("garbage", "/"), None);
    }

    #[test]
    fn limits_and_capabilities_are_read() {
        let limits = "Limit              Soft Limit   Hard Limit   Units\n\
            Max open files     20000        unlimited    files\n\
            Max locked memory  unlimited    unlimited    bytes\n";
        assert_eq!(limit_of(limits, "Max open files"), Some(20_000));
        assert_eq!(limit_of(limits, "Max locked memory"), Some(u64::MAX));
        assert_eq!(limit_of(limits, "Max nothing"), None);
        assert!(may_lock_beyond_limit("CapEff:\t0000000000004000\n"));
        assert!(!may_lock_beyond_limit(
            "CapEff:\t00000000a80425fb\nCapBnd:\t0000000000004000\n"
        ));
    }

    #[test]
    fn the_cpu_that_takes_the_disk_interrupts_is_found() {
        let text = "           CPU0       CPU1       \n\
             36:          3      67544 PCI-MSIX-0000:00:02.0   1-edge      virtio1-req.0\n\
             37:          9          0 PCI-MSIX-0000:00:03.0   1-edge      virtio10-req.0\n\
             38:       7449          0 PCI-MSIX-0000:00:03.0   2-edge      virtio2-output.0\n\
             NMI:          0          0   Non-maskable interrupts\n";
        assert_eq!(interrupt_cpus(text, &["virtio1-req".to_owned()]), [1, 0]);
        assert_eq!(interrupt_cpus(text, &["virtio10-req".to_owned()]), [0]);
        assert!(interrupt_cpus(text, &[]).is_empty());
    }

    #[test]
    fn disks_are_named_from_their_place_in_the_device_tree() {
        let virtio = "/sys/devices/pci0000:00/0000:00:02.0/virtio1/block/vda/vda1";
        assert_eq!(
            disk_of(virtio),
            Some(("vda".into(), vec!["virtio1-req".into()]))
        );
        let nvme = "/sys/devices/pci0000:00/0000:00:1f.0/nvme/nvme0/nvme0n1/nvme0n1p2";
        assert_eq!(
            disk_of(nvme),
            Some(("nvme0n1".into(), vec!["nvme0q".into()]))
        );
        assert_eq!(
            disk_of("/sys/devices/virtual/block/loop0"),
            Some(("loop0".into(), vec![]))
        );
        assert_eq!(disk_of("/sys/devices/x"), None);
    }

    #[test]
    fn versions_quotas_and_cgroups_are_read() {
        assert_eq!(kernel_version("6.18.44-custom"), Some((6, 18)));
        assert_eq!(kernel_version("unknown"), None);
        assert_eq!(quota_of("150000 100000\n"), Some(150));
        assert_eq!(quota_of("max 100000\n"), None);
        let cgroup = "4:memory:/a/b\n1:cpu,cpuacct:/c\n0::/\n";
        assert_eq!(cgroup_path(cgroup, "memory"), Some("/a/b"));
        assert_eq!(cgroup_path(cgroup, "cpu"), Some("/c"));
        assert_eq!(cgroup_path(cgroup, ""), Some("/"));
    }
}
