#include "src/server/address_file.h"

#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"
#include "src/base/failpoint.h"

namespace sluice {

absl::Status WriteAddressFile(const std::string& path, const Addresses& addresses) {
  nlohmann::ordered_json json;
  json["listen"] = addresses.listen;
  if (!addresses.admin_listen.empty()) json["admin_listen"] = addresses.admin_listen;
  json["pid"] = getpid();
  const std::string temporary = absl::StrCat(path, ".", getpid(), ".tmp");
  std::ofstream out(temporary, std::ios::trunc);
  out << json.dump() << "\n";
  out.close();
  if (SLUICE_FAILPOINT(kAddressFileWrite)) {
    out.setstate(std::ios::badbit);
    errno = EIO;
  }
  if (!out || std::rename(temporary.c_str(), path.c_str()) != 0) {
    const std::string why = std::strerror(errno);
    std::remove(temporary.c_str());
    return absl::UnavailableError(absl::StrCat("address_file: cannot write ", path, ": ", why));
  }
  return absl::OkStatus();
}

}  // namespace sluice
