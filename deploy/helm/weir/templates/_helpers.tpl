{{- define "weir.name" -}}{{ .Release.Name | trunc 50 | trimSuffix "-" }}{{- end }}

{{- define "weir.selector" -}}
app.kubernetes.io/name: weir
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "weir.labels" -}}
{{ include "weir.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}

{{- define "weir.secret" -}}{{ .Values.secrets.existing | default (include "weir.name" .) }}{{- end }}

{{- define "weir.postgres" -}}{{ or .Values.secrets.store .Values.secrets.existing }}{{- end }}

{{- define "weir.container" -}}
image: "{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}"
imagePullPolicy: {{ .Values.image.pullPolicy }}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: {drop: [ALL]}
env:
  - {name: WEIR_CONFIG, value: /etc/weir/weir.yaml}
  - {name: OPENAI_API_KEY_FILE, value: /run/secrets/weir/openai-api-key}
  - {name: WEIR_ADMIN_TOKEN_FILE, value: /run/secrets/weir/admin-token}
  {{- if include "weir.postgres" . }}
  - {name: WEIR_STORE, value: ""}
  - {name: WEIR_STORE_FILE, value: /run/secrets/weir/store}
  {{- end }}
  - {name: WEIR_DRAIN, value: {{ .Values.drain | quote }}}
  {{- with .Values.publicUrl }}
  - {name: WEIR_PUBLIC_URL, value: {{ . | quote }}}
  {{- end }}
  {{- with .Values.env }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
volumeMounts:
  - {name: config, mountPath: /etc/weir, readOnly: true}
  - {name: secrets, mountPath: /run/secrets/weir, readOnly: true}
  - {name: data, mountPath: /data}
  - {name: tmp, mountPath: /tmp}
{{- end }}

{{- define "weir.pod" -}}
automountServiceAccountToken: false
securityContext: {runAsNonRoot: true, runAsUser: 1000, fsGroup: 1000, seccompProfile: {type: RuntimeDefault}}
{{- with .Values.imagePullSecrets }}
imagePullSecrets: {{- toYaml . | nindent 2 }}
{{- end }}
volumes:
  - {name: config, configMap: {name: {{ include "weir.name" . }}}}
  - {name: secrets, secret: {secretName: {{ include "weir.secret" . }}, defaultMode: 0440}}
  - {name: tmp, emptyDir: {}}
  {{- if .Values.persistence.enabled }}
  - {name: data, persistentVolumeClaim: {claimName: {{ include "weir.name" . }}}}
  {{- else }}
  - {name: data, emptyDir: {}}
  {{- end }}
{{- end }}
