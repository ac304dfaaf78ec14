//! `make deb`: the Debian package that has DKMS build Gannet for each installed kernel.

use crate::{module, progress::Step};
use anyhow::{Context, Result};
use gannet_lab::{Kernel, Layout};
use std::process::Stdio;

/// Builds the package, has lintian look at it where there is one, and prints the file. Whether lintian found nothing.
pub fn command(layout: &Layout) -> Result<bool> {
    layout.ensure(&["toolchain"])?;
    let core = module::build_core(layout, Kernel::V6_12)?;
    let version = env!("CARGO_PKG_VERSION");
    let package = layout.out.join(format!("gannet-dkms_{version}_amd64.deb"));
    let step = Step::start(layout, "packing the Debian package");
    let mut script = layout.tool("sh");
    script.arg(layout.root.join("linux/debian/build.sh")).arg(version).arg(&core).arg(&package);
    module::follow(&mut script, &step).context("the package does not build")?;
    step.done();
    println!("{}", package.display());
    let there = layout.tool("lintian").arg("--version").stdout(Stdio::null()).status();
    if !there.is_ok_and(|status| status.success()) {
        eprintln!("lintian is not installed: not checked (tests/package/run.sh has its own)");
        return Ok(true);
    }
    let found = layout.tool("lintian").arg("--fail-on=error,warning").arg(&package).status()?;
    Ok(found.success())
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::PermissionsExt;
    use std::path::{Path, PathBuf};
    use std::process::Command;

    /// Where there is one kernel to build for, and a DKMS that notes what it is asked to do.
    struct Machine(PathBuf);

    impl Machine {
        /// `status` is what DKMS says of the module.
        fn new(name: &str, status: &str) -> Self {
            Self::with(name, status, "true")
        }

        /// `outcome` is a command that succeeds, or fails, as DKMS shall.
        fn with(name: &str, status: &str, outcome: &str) -> Self {
            let name = format!("gannet-package-{}-{name}", std::process::id());
            let root = std::env::temp_dir().join(name);
            fs::create_dir_all(root.join("modules/6.99/build")).unwrap();
            let (dkms, log) = (root.join("dkms"), root.join("log"));
            let stub = format!(
                "#!/bin/sh\n[ $1 != status ] || {{ echo '{status}'; exit; }}\necho \"$*\" >>{}\n{outcome}\n",
                log.display()
            );
            executable(&dkms, &stub);
            let made = Self(root);
            executable(&made.0.join("build-for"), &made.filled("build-for"));
            made
        }

        /// A script of the package, as it would be on this machine.
        fn filled(&self, script: &str) -> String {
            let debian = Path::new(env!("CARGO_MANIFEST_DIR")).join("../linux/debian");
            let read = |name| fs::read_to_string(debian.join(name)).unwrap();
            let here = |name| self.0.join(name).display().to_string();
            read(script)
                .replace("@IN_USE@", &read("in-use.sh"))
                .replace("@VERSION@", "9")
                .replace("/usr/lib/gannet-dkms/build-for", &here("build-for"))
                .replace("/etc/dkms", &here("etc"))
                .replace("/lib/modules", &here("modules"))
                .replace("/sys/module", &here("none"))
        }

        /// What the script has asked of DKMS.
        fn asked(&self, script: &str, argument: &str) -> Vec<String> {
            let text = self.filled(script);
            let path = format!("{}:{}", self.0.display(), std::env::var("PATH").unwrap());
            let mut shell = Command::new("sh");
            let ran = shell.args(["-c", &text, script, argument]).env("PATH", path).output();
            assert!(ran.unwrap().status.success(), "{script} {argument}");
            let log = fs::read_to_string(self.0.join("log")).unwrap_or_default();
            log.lines().map(str::to_owned).collect()
        }
    }

    fn executable(path: &Path, text: &str) {
        fs::write(path, text).unwrap();
        fs::set_permissions(path, fs::Permissions::from_mode(0o755)).unwrap();
    }

    impl Drop for Machine {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    const ABORTED: [&str; 3] = ["abort-upgrade", "abort-remove", "abort-deconfigure"];

    /// Before whatever went wrong prerm has taken the modules away.
    #[test]
    fn a_package_that_stays_has_its_modules_built_again() {
        for aborted in ABORTED.into_iter().chain(["configure"]) {
            let asked = Machine::new(aborted, "").asked("postinst", aborted);
            let built = ["add -m gannet -v 9", "install -m gannet -v 9 -k 6.99 --force"];
            assert_eq!(asked, built, "{aborted}");
        }
        for going in ["upgrade", "remove", "deconfigure"] {
            let asked = Machine::new(going, "").asked("prerm", going);
            assert_eq!(asked, ["remove -m gannet -v 9 --all"], "{going}");
        }
    }

    /// Where prerm has refused, since virtual machines run, nothing was taken away.
    #[test]
    fn modules_that_are_still_there_are_not_built_again() {
        for aborted in ABORTED {
            let there =
                Machine::new(&format!("{aborted}-there"), "gannet/9, 6.99, x86_64: installed");
            assert_eq!(there.asked("postinst", aborted), [""; 0], "{aborted}");
        }
    }
    /// dpkg waits for it: a failure would leave the kernel half installed, though the stock modules serve on it. `asked` demands
    /// success of each script.
    #[test]
    fn a_kernel_for_which_it_does_not_build_is_installed_all_the_same() {
        let asked = ["install -m gannet -v 9 -k 6.99 --force"];
        let machine = Machine::with("not-built", "gannet/9: added", "exit 10");
        assert_eq!(machine.asked("kernel-hook", "6.99"), asked);
        // Nor does the package's own installation fail.
        assert_eq!(machine.asked("postinst", "configure"), [asked, asked].concat());
    }

    #[test]
    fn a_new_kernel_is_built_for_once_and_with_its_headers() {
        let asked = |name, status, kernel| Machine::new(name, status).asked("kernel-hook", kernel);
        let built = ["install -m gannet -v 9 -k 6.99 --force"];
        assert_eq!(asked("hook", "gannet/9: added", "6.99"), built);
        assert_eq!(asked("hook-twice", "gannet/9, 6.99, x86_64: installed", "6.99"), [""; 0]);
        assert_eq!(asked("hook-no-headers", "gannet/9: added", "6.98"), [""; 0]);
        // The package is removed, not purged.
        let machine = Machine::new("hook-alone", "");
        fs::remove_file(machine.0.join("build-for")).unwrap();
        assert_eq!(machine.asked("kernel-hook", "6.99"), [""; 0]);
        // DKMS's hook fails with a module that does not build; ours is for it.
        assert!(machine.filled("dkms.conf").contains("\nAUTOINSTALL=\"\"\n"));
    }
}
